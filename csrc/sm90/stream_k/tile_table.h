// The tile configurations of kernels that cut the last wave.
#pragma once

#include "sm90/tile_table.h"

namespace jgg::sm90::stream_k {

using Tiles = TileTable<Tile<128, 256, 2, KernelKind::kStreamK>>;

}  // namespace jgg::sm90::stream_k
