// The compile-time configuration of float32 kernels for groups of few rows, and their shared
// memory.
//
// For such a group a kernel reads almost only weights, and takes as long as reading them. A pass
// that splits weights into parts first reads and writes them once more, so this kernel splits them
// on their way from shared memory to the tensor cores. The tensor cores take one operand from
// registers, the one on the M side. The weights' columns are therefore on the M side and the rows
// on the N side: the product is transposed. M comes in 64 and N in 8, so few rows then add little.
#pragma once

#include "sm90/barrier.h"
#include "sm90/bfloat16_parts.h"
#include "sm90/config.h"
#include "sm90/swapped.h"

namespace jgg::sm90 {

constexpr int kMmaK = 16;  // its K
constexpr int kBoxColumns = kRowBytes / sizeof(float);

constexpr int kRowThreads = kWarpgroup;  // that bring rows

// A tile has at most kTileM rows and kTileN columns. Weights are contiguous along the contracted
// dimension (K) or along their columns (MN).
template <Major kRhsMajor_, int kParts_>
struct SwappedSplitConfig {
  static constexpr Major kRhsMajor = kRhsMajor_;
  static constexpr int kParts = kParts_;
  static constexpr int kTileM = 64;
  static constexpr int kTileN = kConsumers * kColumnsPerConsumer;
  static constexpr int kTileK = kRowBytes / sizeof(cutlass::bfloat16_t);  // a row of a part
  static constexpr int kCluster = 1;

  static constexpr bool kAlongK = kRhsMajor == Major::kK;
  static constexpr int kBoxes = (kAlongK ? kTileK : kTileN) / kBoxColumns;
  static constexpr int kBoxRows = kAlongK ? kTileN : kTileK;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  static constexpr int kWeightBytes = kBoxes * kBoxBytes;
  static constexpr int kPartBytes = kTileM * kRowBytes;
  static constexpr int kStages =
      (kSharedMemoryLimit - kSharedMemoryReserve) / (kWeightBytes + kParts * kPartBytes);
};

template <class Config>
struct SwappedSplitStorage {
  alignas(1024) uint8_t weights[Config::kStages][Config::kWeightBytes];
  alignas(1024) uint8_t rows[Config::kStages][Config::kParts][Config::kPartBytes];
  WorkTile work[kWorkStages];
  alignas(8) Barrier weights_full[Config::kStages];
  alignas(8) Barrier rows_full[Config::kStages];
  alignas(8) Barrier empty[Config::kStages];
  alignas(8) Barrier work_full[kWorkStages];
  alignas(8) Barrier work_empty[kWorkStages];
};

// The first of a lane's two columns among the 16 of its warp, which WGMMA takes for row lane / 4 of
// its M side; the other is 8 further on in both. In this order eight neighbouring lanes find what
// they read at once in all banks.
__device__ inline int column_of_lane() {
  int const row = threadIdx.x % kWarpSize / 4;
  return row / 2 + row % 2 * 4;
}

}  // namespace jgg::sm90
