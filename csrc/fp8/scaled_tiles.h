// The tile configurations that are compiled. Python's plan chooses among them.
#pragma once

#include "fp8/scaled_ragged_dot.h"

namespace jgg::fp8 {

// kMmaN: columns that a consumer multiplies at a time.
template <int kTileN_, int kMmaN_, int kCluster_, ScaledSchedule kSchedule_>
struct Tile {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kMmaN = kMmaN_;
  static constexpr int kCluster = kCluster_;
  static constexpr ScaledSchedule kSchedule = kSchedule_;
};

template <class... Tiles>
struct TileList {};

using NoncontractingTiles = TileList<
    Tile<256, 128, 2, ScaledSchedule::kCooperative>, Tile<256, 128, 2, ScaledSchedule::kOrdered>,
    Tile<256, 64, 2, ScaledSchedule::kOverlapped>,
    Tile<256, 64, 2, ScaledSchedule::kOverlappedOrdered>,
    Tile<192, 192, 2, ScaledSchedule::kCooperative>, Tile<192, 192, 2, ScaledSchedule::kOrdered>>;
using ContractingTiles = TileList<Tile<256, 128, 2, ScaledSchedule::kCooperative>,
                                  Tile<256, 64, 2, ScaledSchedule::kOverlapped>,
                                  Tile<256, 64, 2, ScaledSchedule::kOverlappedOrdered>>;

}  // namespace jgg::fp8
