// The tile configurations that are compiled. Python's plan chooses among them.
#pragma once

namespace jgg::fp8 {

// kMmaN: columns that a consumer multiplies at a time.
template <int kTileN_, int kMmaN_, int kCluster_>
struct Tile {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kMmaN = kMmaN_;
  static constexpr int kCluster = kCluster_;
};

template <class... Tiles>
struct TileList {};

using NoncontractingTiles = TileList<Tile<256, 128, 2>>;
using ContractingTiles = TileList<Tile<256, 128, 2>>;

}  // namespace jgg::fp8
