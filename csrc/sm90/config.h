// Everything about a kernel that is fixed at compile time, and the layout of its shared memory.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "multiprocessors.h"
#include "scheduler/work_tile.h"
#include "sm90/barrier.h"
#include "types.h"

namespace jgg::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;

// Registers of a thread. The warpgroup that only issues copies gives registers to the warpgroups
// that accumulate. Few kernels have another warpgroup, which assists.
struct Registers {
  int load;
  int multiply;
  int assist = 0;
};
constexpr Registers kTileRegisters{40, 232};
// Schedules of pieces, and warps that gather contracted rows, take more registers.
constexpr Registers kLargerLoadRegisters{56, 224};

constexpr int kRowsPerConsumer = 64;  // M of one WGMMA instruction
constexpr int kRowBytes = 128;        // the widest swizzle: every shared-memory row is 128 bytes

constexpr size_t kParameterLimit = 32764;  // bytes of a kernel's parameters, since CUDA 12.1
constexpr int kSharedMemoryLimit = 232448;
constexpr int kSharedMemoryReserve = 2048;  // barriers, the ring of work tiles
constexpr int kWorkStages = 4;
constexpr int kStepsOfRows = 4;  // the steps whose rows gather.h finds together

// Returns CuTe's name of a major.
constexpr cute::GMMA::Major gmma_major(Major major) {
  return major == Major::kK ? cute::GMMA::Major::K : cute::GMMA::Major::MN;
}

template <class Config>
constexpr int kMaxClusters = kMostMultiprocessors / Config::kCluster;

// `kLhsMajor`/`kRhsMajor` say whether an operand is contiguous along the contracted dimension (K)
// or along its other dimension (MN). WGMMA reads both kinds of 16-bit operands, so no operand is
// transposed.
template <class Element_, class Output_, Major kLhsMajor_, Major kRhsMajor_, int kTileM_,
          int kTileN_, int kCluster_, KernelKind kKind_ = KernelKind::kCooperative>
struct KernelConfig {
  using Element = Element_;
  using Output = Output_;
  static constexpr Major kLhsMajor = kLhsMajor_;
  static constexpr Major kRhsMajor = kRhsMajor_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = kRowBytes / sizeof(Element);
  static constexpr int kCluster = kCluster_;
  static constexpr KernelKind kKind = kKind_;
  static constexpr bool kTakesTurns = kKind == KernelKind::kPingpong;
  static_assert(kTileM == 2 * kRowsPerConsumer, "an operand tile arrives in two boxes");

  // The result leaves through subtiles of 64 rows by 128 bytes. Each consumer has its own slots for
  // them. Only consumers that take turns and have 32-bit results share their slots. Consumers that
  // take turns and have 16-bit results get more slots, because their epilogue does more than store
  // (consumer_fused.h).
  static constexpr bool kSharesSlots = kTakesTurns && sizeof(Output) == 4;
  static constexpr int kSubtileColumns = kRowBytes / sizeof(Output);
  static constexpr int kSubtiles = kTileN / kSubtileColumns;
  static constexpr int kSubtileBytes = kRowsPerConsumer * kRowBytes;
  static constexpr int kSubtileSlots = kSharesSlots         ? 3
                                       : kTakesTurns        ? 4
                                       : kSubtiles % 2 == 0 ? 2
                                                            : 3;
  static constexpr int kSubtileRings = kSharesSlots ? 1 : kConsumers;

  static constexpr int kLhsBytes = kTileM * kRowBytes;
  static constexpr int kRhsBytes = kTileN * kRowBytes;
  static constexpr int stages_beside(int slots) {
    return (kSharedMemoryLimit - kSharedMemoryReserve - kSubtileRings * slots * kSubtileBytes) /
           (kLhsBytes + kRhsBytes);
  }
  static constexpr int kStages = stages_beside(kSubtileSlots);
  static_assert(kStages >= 2, "the tile is too large for shared memory");

  // An operand tile arrives in two boxes. The CTAs of a cluster that shares the operand load one
  // box each. A box of an MN-major operand is made of slabs 64 wide and kTileK deep, because the
  // swizzle spans 128 bytes of the contiguous dimension.
  static constexpr int kBoxes = 2;
  static constexpr int kLhsBoxBytes = kLhsBytes / kBoxes;
  static constexpr int kRhsBoxBytes = kRhsBytes / kBoxes;
  static constexpr int kSlab = kRowBytes / sizeof(Element);
  // An odd number of slabs is halved along K instead.
  static constexpr bool kRhsBoxesSplitK = kRhsMajor == Major::kMN && kTileN / kBoxes % kSlab != 0;
  static constexpr int kRhsBoxColumns = kRhsBoxesSplitK ? kTileN : kTileN / kBoxes;
  static constexpr int kRhsBoxDepth = kRhsBoxesSplitK ? kTileK / kBoxes : kTileK;
  static constexpr int kSlabBytes = kRhsBoxDepth * kRowBytes;
};

// A kernel with slots for all subtiles of a tile, and fewer stages. It is for tiles of at
// most kMostSteps steps: their stages hold more than a whole tile anyway, and their stores wait for
// slots, because there are few steps between which they can be spread.
template <class Config>
struct WithWholeTileSlots : Config {
  static constexpr int kMostSteps = 2;
  static constexpr int kSubtileSlots = Config::kSubtiles;
  static constexpr int kStages = Config::stages_beside(kSubtileSlots);
  static_assert(kStages > kMostSteps);
};

template <class Config>
struct SharedStorage {
  using Element = typename Config::Element;

  alignas(1024) Element lhs[Config::kStages][Config::kLhsBytes / sizeof(Element)];
  alignas(1024) Element rhs[Config::kStages][Config::kRhsBytes / sizeof(Element)];
  alignas(
      1024) uint8_t subtiles[Config::kSubtileRings][Config::kSubtileSlots][Config::kSubtileBytes];
  WorkTile work[kWorkStages];
  alignas(8) Barrier full[Config::kStages];
  alignas(8) Barrier empty[Config::kStages];
  alignas(8) Barrier work_full[kWorkStages];
  alignas(8) Barrier work_empty[kWorkStages];
  // The numbers of the rows that gather.h loads, of one tile or of kStepsOfRows steps.
  alignas(16) int rows[kStepsOfRows * kRowsPerConsumer];
};

// How many of a tile's first steps release their stages early. Such a step releases its stage when
// its products are done, before the consumer waits for the next stage. The producer can then fill
// every stage, which helps while loads are late, as they are when a tile begins. All other steps
// release their stage after the next step is issued, so that the tensor cores always have work.
constexpr int kNoSteps = 0, kFirstSteps = 8, kAllSteps = 1 << 30;
// The number of these steps is in the kernel's parameters, as `early_steps`.
constexpr int kStepsOfParams = -1;

}  // namespace jgg::sm90
