// The tile configurations that are compiled for rank-k and rank-2k updates.
#pragma once

#include "dispatch.h"

namespace jgg::sm90 {

// Fine tiles are for updates that have too few wide tiles to fill all multiprocessors, or whose few
// wide tiles take too long.
using RankKTiles = TileTable<Tile<128, 256, 2>, Tile<128, 128, 2, KernelKind::kFine>>;

// Updates of float32 operands.
using RankKPartsTiles = TileTable<Tile<128, 256, 2>>;

}  // namespace jgg::sm90
