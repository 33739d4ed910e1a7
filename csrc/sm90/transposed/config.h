// What is fixed at compile time about kernels for groups of few rows, and the shared memory that
// follows.
//
// In such a group nearly all that is read are weights, and time is what reading them takes. So the
// weights' columns are on the M side of WGMMA, which comes in 64, and the rows on its N side, which
// comes in 8: the product is transposed. Few rows then take little shared memory and few registers,
// and both are left to weights on their way. Tiles are small, so that all multiprocessors are done
// at about the same time, and blocks are in no clusters, where each would wait for the other.
#pragma once

#include "sm90/kernel_config.h"

namespace jgg::sm90::transposed {

// kTileM: rows at most; kTileN: columns; kBlocks: thread blocks that share a multiprocessor.
template <int kTileM_, int kTileN_, int kBlocks_>
struct Shape {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kCluster = 1;

  // M of one WGMMA. The consumers take these slices of a tile's columns in turn.
  static constexpr int kSliceColumns = 64;
  static constexpr int kSlices = kTileN / kSliceColumns / kConsumers;  // of each consumer
  static_assert(kTileN % (kSliceColumns * kConsumers) == 0);

  // Rows are loaded and multiplied in as many boxes as the group has.
  static constexpr int kBoxRows = 8;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  static_assert(kTileM % kBoxRows == 0);

  static constexpr int kLhsBytes = kTileM * kRowBytes;
  static constexpr int kRhsBytes = kTileN * kRowBytes;

  // Of a multiprocessor's 228 KB the system keeps one for each block.
  static constexpr int kSharedMemory = 228 * 1024 / kBlocks / 1024 * 1024 - 1024;
  static constexpr int kSharedMemoryReserve = 1024;  // the ring of work tiles and its barriers
  template <int kMoreBytes>
  static constexpr int kStagesOf =
      (kSharedMemory - kSharedMemoryReserve) / (kLhsBytes + kRhsBytes + kMoreBytes);

  // A block starts with what its launch bounds leave to each thread: 168, 80 or 56.
  static constexpr int kConsumerRegisters = kBlocks == 1 ? 232 : kBlocks == 2 ? 96 : 64;
};

// The rows of a tile, those of its group that are left.
template <class Config>
__device__ int rows_of(WorkTile const& work) {
  int const left = work.extent - work.m;
  return left < Config::kTileM ? left : Config::kTileM;
}

// The first column of a consumer's slice.
template <class Config>
__device__ constexpr int first_column(int slice, int consumer) {
  return (slice * kConsumers + consumer) * Config::kSliceColumns;
}

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t rhs[Config::kStages][Config::kRhsBytes];
  alignas(1024) uint8_t lhs[Config::kStages][Config::kLhsBytes];
  WorkTile work[kWorkStages];
  alignas(8) Barrier full[Config::kStages];
  alignas(8) Barrier empty[Config::kStages];
  alignas(8) Barrier work_full[kWorkStages];
  alignas(8) Barrier work_empty[kWorkStages];
};

}  // namespace jgg::sm90::transposed
