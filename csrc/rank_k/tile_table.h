// The tile configurations that are compiled for rank-k and rank-2k updates.
#pragma once

#include "sm90/tile_table.h"

namespace jgg::sm90 {

// Where those are too few for all multiprocessors, or their time too long.
using FineRankKTile = Tile<128, 128, 2, KernelKind::kFine>;
using RankKTiles = TileTable<Tile<128, 256, 2>, FineRankKTile>;

}  // namespace jgg::sm90
