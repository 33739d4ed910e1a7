// The tile configurations that are compiled for FP8 operands. Python's plan chooses among them.
#pragma once

#include "dispatch.h"

namespace jgg::fp8 {

using NoncontractingTiles = TileTable<Tile<128, 256, 2>>;
using SwappedTiles = TileTable<Tile<32, 128, 1, KernelKind::kSwapped>>;
using StreamKTiles = TileTable<Tile<128, 256, 2, KernelKind::kStreamK>>;
using ContractingTiles = TileTable<Tile<128, 256, 2>>;

}  // namespace jgg::fp8
