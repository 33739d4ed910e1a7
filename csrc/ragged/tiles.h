// The tile configurations that are compiled for ragged products. Python's plan chooses among them.
#pragma once

#include "dispatch.h"

namespace jgg::sm90 {

// Noncontracting products of 16-bit operands.
using NoncontractingTiles = TileTable<Tile<128, 256, 2>>;
using StreamKTiles = TileTable<Tile<128, 256, 2, KernelKind::kStreamK>>;

// Contracting ones. Consumers take turns for float32 results alone, and only where the rows of
// neither operand are contiguous, so that none are masked.
using ContractingTiles = TileTable<Tile<128, 256, 2>, Tile<128, 192, 2, KernelKind::kPingpong>>;

// What contracting products of unequal groups are computed in, whichever tile they have otherwise.
using CutTile = Tile<128, 256, 2>;

// Products of float32 operands.
using Float32Tiles = TileTable<Tile<128, 256, 2>>;
using Float32SwappedTiles = TileTable<Tile<64, 128, 1, KernelKind::kSwapped>>;

}  // namespace jgg::sm90
