// The compile-time configuration of float32 kernels for groups of few rows, and their shared
// memory.
//
// For such groups a kernel reads almost nothing but weights, and takes as long as reading them
// takes. An earlier pass that splits weights into parts would read and write them once more, so
// this kernel splits them on their way from shared memory to the tensor cores. The tensor cores
// take one operand from registers, the one on the M side. The weights' columns are therefore on the
// M side and the rows on the N side: the product is transposed. M is a multiple of 64 and N a
// multiple of 8, so few rows cost little on the N side.
#pragma once

#include "sm90/barrier.h"
#include "sm90/bfloat16_parts.h"
#include "sm90/config.h"
#include "sm90/swapped.h"

namespace jgg::sm90 {

constexpr int kMmaK = 16;  // K of one WGMMA
constexpr int kBoxColumns = kRowBytes / sizeof(float);

constexpr int kRowThreads = kWarpgroup;  // threads that bring rows

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

// Returns the first of a lane's two columns among the 16 columns of its warp. This column is row
// lane / 4 of WGMMA's M side. The lane's other column is 8 columns further on, and 8 rows further
// on the M side. In this order, eight neighbouring lanes read from different banks of shared
// memory.
__device__ inline int column_of_lane() {
  int const row = threadIdx.x % kWarpSize / 4;
  return row / 2 + row % 2 * 4;
}

}  // namespace jgg::sm90
