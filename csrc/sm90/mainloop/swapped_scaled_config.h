// The compile-time configuration of FP8 kernels for groups of few rows, and their shared memory.
//
// For such groups a kernel reads almost nothing but weights, and takes as long as reading them
// takes. The weights' columns are on the M side of WGMMA, which is a multiple of 64. The rows are
// on its N side, which is a multiple of 8. The product is therefore transposed. Few rows then take
// little shared memory and few registers, which leaves room for more weights in flight. Tiles are
// small, so that all multiprocessors end at about the same time. Blocks are not in clusters,
// because the blocks of a cluster would wait for each other.
#pragma once

#include "sm90/mainloop/scaled_config.h"
#include "sm90/swapped.h"

namespace jgg::sm90 {

constexpr int kSwappedBlocks = 3;           // blocks that share a multiprocessor
constexpr int kWorkReserve = 1024;          // the ring of work tiles and its barriers
constexpr int kMultiprocessor = 228 << 10;  // its bytes of shared memory
constexpr int kSystemReserve = 1 << 10;     // of these, what the system takes for a block

// A tile has at most kTileM rows and kTileN columns. kBlocks blocks share a multiprocessor, and
// kMore is what a kernel takes of shared memory besides SwappedScaledStorage.
template <class Lhs_, class Rhs_, int kTileM_, int kTileN_, int kBlocks = kSwappedBlocks,
          int kMore = 0>
struct SwappedScaledConfig {
  using Lhs = Lhs_;
  using Rhs = Rhs_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = kRowBytes;
  static constexpr int kCluster = 1;
  static_assert(kTileK == kScaleBlock);
  static_assert(kTileN == kConsumers * kColumnsPerConsumer);

  // Rows are loaded and stored in boxes, and only in the boxes that have rows of the group.
  static constexpr int kBoxRows = 8;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  static constexpr int kLhsBoxRows = kBoxRows;
  static constexpr int kOutBoxRows = kBoxRows;
  static_assert(kTileM % kBoxRows == 0);

  static constexpr bool kColumnScales = false;
  static constexpr bool kStepScales = true;
  static constexpr int kScaleColumns = kScaleBlock;
  static constexpr int kRhsScales = kTileN / kScaleColumns;
  static_assert(kTileN % kScaleColumns == 0);

  static constexpr int kLhsBytes = kTileM * kRowBytes;
  static constexpr int kRhsBytes = kTileN * kRowBytes;
  static constexpr int kScaleBytes = (kTileM + kRhsScales) * sizeof(float);
  // The bytes of shared memory through which a consumer stores its results.
  static constexpr int kSubtileBytes = kTileM * kRowBytes;

  static constexpr int kSharedMemory = kMultiprocessor / kBlocks - kSystemReserve;
  static constexpr int kStages =
      (kSharedMemory - kWorkReserve - kMore - kConsumers * kSubtileBytes) /
      (kLhsBytes + kRhsBytes + kScaleBytes + 3 * sizeof(Barrier));
  static_assert(kStages >= 2, "the tile is too large for shared memory");
};

template <class Config>
struct SwappedScaledStorage {
  alignas(1024) uint8_t rhs[Config::kStages][Config::kRhsBytes];
  alignas(1024) uint8_t lhs[Config::kStages][Config::kLhsBytes];
  alignas(1024) uint8_t subtiles[kConsumers][Config::kSubtileBytes];
  alignas(16) float lhs_scales[Config::kStages][Config::kTileM];
  alignas(16) float rhs_scales[Config::kStages][Config::kRhsScales];
  WorkTile work[kWorkStages];
  alignas(8) Barrier full[Config::kStages];
  alignas(8) Barrier scales_full[Config::kStages];
  alignas(8) Barrier empty[Config::kStages];
  alignas(8) Barrier work_full[kWorkStages];
  alignas(8) Barrier work_empty[kWorkStages];
};

}  // namespace jgg::sm90
