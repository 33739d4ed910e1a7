// The tile configurations that are compiled for rank-k and rank-2k updates.
#pragma once

#include "sm90/tile_table.h"

namespace jgg::sm90 {

using RankKTiles = TileTable<Tile<128, 256, 2>>;

}  // namespace jgg::sm90
