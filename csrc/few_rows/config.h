// The compile-time configuration of products for groups of few rows, and their shared memory.
#pragma once

#include "mlp/gated_ragged_dot.h"
#include "scheduler/warp.h"
#include "scheduler/work_tile.h"
#include "sm90/config.h"

namespace jgg::few_rows {

using sm90::Barrier;
using sm90::kRowBytes;
using sm90::kWorkStages;

// Warps: one copies matrices, one schedules, two bring rows, and the rest multiply.
constexpr int kRowWarps = 2;
constexpr int kFirstConsumer = 2 + kRowWarps;
constexpr int kConsumerWarps = 4;
constexpr int kThreads = (kFirstConsumer + kConsumerWarps) * kWarpSize;
constexpr int kRowThreads = kRowWarps * kWarpSize;

// Two thread blocks share a multiprocessor. One loads while the other ends a tile.
constexpr int kBlocks = 2;
constexpr int kSharedMemory = sm90::kSharedMemoryLimit / kBlocks - 1024;

// `read_groups` reads the sizes of up to this many groups at once, before the first tile. With more
// groups, the schedule reads sizes where it needs them.
constexpr int kGroupsAtOnce = 512;

// The sizes of groups and the order of pairs, which are read and sorted before the first tile.
struct Groups {
  alignas(16) int order[mlp::Pairs::kMost];  // the pair of each row
  int sizes[kGroupsAtOnce];
  int offset;
};
static_assert(mlp::Pairs::kMostGroups <= kGroupsAtOnce);

// A stage has 128 columns by 64 elements of K: 128 columns of one matrix, or 64 columns of gate and
// the same 64 of up.
template <class Element_, int kTileM_>
struct Config {
  using Element = Element_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kBoxColumns = kRowBytes / sizeof(Element);
  static constexpr int kBoxes = 2;
  static constexpr int kTileN = kBoxes * kBoxColumns;
  static constexpr int kTileK = kRowBytes / sizeof(Element);
  static constexpr int kCluster = 1;
  static constexpr bool kSortsPairs = true;

  // The distance from a warp's first 16 columns to its second 16, if both are of one matrix.
  static constexpr int kNextRun = 16;

  static constexpr int kBoxBytes = kTileK * kRowBytes;
  static constexpr int kMatrixBytes = kBoxes * kBoxBytes;
  static constexpr int kLhsBytes = kTileM * kRowBytes;
  static constexpr int kReserve = sm90::kSharedMemoryReserve + sizeof(Groups);
  static constexpr int kStages = (kSharedMemory - kReserve) / (kMatrixBytes + kLhsBytes);
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t matrices[Config::kStages][Config::kMatrixBytes];
  alignas(1024) uint8_t rows[Config::kStages][Config::kLhsBytes];
  WorkTile work[kWorkStages];
  Groups groups;
  alignas(8) Barrier full[Config::kStages];
  alignas(8) Barrier empty[Config::kStages];
  alignas(8) Barrier work_full[kWorkStages];
  alignas(8) Barrier work_empty[kWorkStages];
};

}  // namespace jgg::few_rows
