// The tile configurations that are compiled. Python's plan chooses among them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "types.h"

namespace jgg::sm90 {

template <int kTileM_, int kTileN_, int kCluster_, KernelKind kKind_ = KernelKind::kCooperative>
struct Tile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kCluster = kCluster_;
  static constexpr KernelKind kKind = kKind_;
  static constexpr TileConfig kConfig{kTileM, kTileN, kCluster, kKind};
};

template <class... Tiles>
struct TileTable {};

template <class... Tiles>
std::vector<TileConfig> list(TileTable<Tiles...>) {
  return {Tiles::kConfig...};
}

// Picks the entry of the table that `config` names and hands it to `function`.
template <class... Tiles, class Function>
cudaError_t with_tile(TileTable<Tiles...>, TileConfig config, Function function) {
  cudaError_t status = cudaErrorInvalidConfiguration;
  auto const matches = [&](auto tile) {
    if (!(config == decltype(tile)::kConfig)) return false;
    status = function(tile);
    return true;
  };
  (matches(Tiles{}) || ...);
  return status;
}

// Of noncontracting products of 16-bit operands.
using NoncontractingTiles = TileTable<Tile<128, 256, 2>>;

// Of contracting ones. Consumers take turns for float32 results alone, and only where the rows of
// neither operand are contiguous, so that none are masked.
using ContractingTiles = TileTable<Tile<128, 256, 2>, Tile<128, 192, 2, KernelKind::kPingpong>>;

// What contracting products of unequal groups are computed in, whichever tile they have otherwise.
using CutTile = Tile<128, 256, 2>;
using CutTiles = TileTable<CutTile>;

// Of float32 operands, whose mainloop is of another kind.
using Float32Tiles = TileTable<Tile<128, 256, 2>>;
using Float32FewRowsTiles = TileTable<Tile<64, 128, 1, KernelKind::kSwapped>>;

}  // namespace jgg::sm90
