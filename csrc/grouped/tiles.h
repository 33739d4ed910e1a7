// The tile configurations that are compiled for products of lists of matrices.
#pragma once

#include "dispatch.h"

namespace jgg::sm90 {

using GroupedGemmTiles = TileTable<Tile<128, 256, 2>, Tile<128, 128, 1>>;

}  // namespace jgg::sm90
