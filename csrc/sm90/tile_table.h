// The tile configurations that are compiled. Python's plan chooses among them.
#pragma once

namespace jgg::sm90 {

template <int kTileM_, int kTileN_, int kCluster_>
struct Tile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kCluster = kCluster_;
};

template <class... Tiles>
struct TileTable {};

using RaggedDotTiles = TileTable<Tile<128, 256, 2>>;

}  // namespace jgg::sm90
