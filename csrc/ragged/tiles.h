// The tile configurations that are compiled for ragged products. Python's plan chooses among them.
#pragma once

#include <type_traits>

#include "dispatch.h"
#include "scheduler/host_device.h"

namespace jgg::sm90 {

// Tiles for 16-bit operands. NarrowTile serves results of at most 128 columns, and problems with
// too few wide tiles to occupy all multiprocessors.
using WideTile = Tile<128, 256, 2>;
using NarrowTile = Tile<128, 128, 2>;
template <class Config>
constexpr bool kIsNarrow = Config::kTileN == NarrowTile::kTileN && !Config::kTakesTurns;

// Returns the number of columns to load for a tile that begins at column `n` of `columns`. A wide
// tile loads zeros for the columns past the last one. Otherwise the tensor cores would multiply old
// contents of shared memory, which takes more power and makes gpt_oss_up 0.4 to 0.7 % slower.
template <class Config>
JGG_HOST_DEVICE int columns_to_load(int columns, int n) {
  return kIsNarrow<Config> ? columns - n : Config::kTileN;
}

// Noncontracting products of 16-bit operands.
using NoncontractingTiles = TileTable<WideTile, NarrowTile>;
using StreamKTiles =
    TileTable<Tile<128, 256, 2, KernelKind::kStreamK>, Tile<128, 128, 2, KernelKind::kStreamK>>;

// Contracting products of 16-bit operands. Consumers take tiles alternately only for float32
// results.
using ContractingTiles = TileTable<WideTile, Tile<128, 192, 2, KernelKind::kPingpong>, NarrowTile>;

// Gradients of weights. The smaller tiles have kernels that gather rows, and the smallest has a
// kernel for the down projection alone.
using WeightGradientTiles = TileTable<WideTile, Tile<128, 192, 2>, NarrowTile>;

// Tiles of contracting products whose unequal groups are cut along the rows. Consumers share a tile
// that is cut, even in kernels in which they take whole tiles alternately.
using CutTiles = TileTable<WideTile, NarrowTile>;
template <class Whole>
using CutTileOf = std::conditional_t<Whole::kKind == KernelKind::kCooperative, Whole, WideTile>;

// Products of float32 operands.
using Float32Tiles = TileTable<Tile<128, 256, 2>>;
using Float32SwappedTiles = TileTable<Tile<64, 128, 1, KernelKind::kSwapped>>;

}  // namespace jgg::sm90
