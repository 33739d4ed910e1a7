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

// Of a kernel for groups of few rows.
template <int kTileM_, int kTileN_>
struct TransposedTile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kCluster = 1;
};

template <class... Tiles>
struct TileList {};

using NoncontractingTiles = TileList<Tile<256, 128, 2>>;
using TransposedTiles = TileList<TransposedTile<32, 128>>;  // noncontracting products too
using StreamKTiles = TileList<Tile<256, 128, 2>>;           // whose last wave is cut along K
using ContractingTiles = TileList<Tile<256, 128, 2>>;

}  // namespace jgg::fp8
