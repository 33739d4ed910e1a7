// The tile configurations that are compiled for FP8 operands. Python's plan chooses among them.
#pragma once

#include "dispatch.h"

namespace jgg::sm90 {

using ScaledNoncontractingTiles = TileTable<Tile<128, 256, 2>>;
using ScaledSwappedTiles = TileTable<Tile<32, 128, 1, KernelKind::kSwapped>>;
using ScaledStreamKTiles = TileTable<Tile<128, 256, 2, KernelKind::kStreamK>>;
using ScaledContractingTiles = TileTable<Tile<128, 256, 2>>;

}  // namespace jgg::sm90
