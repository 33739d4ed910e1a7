// Copies the scales of one step from global to shared memory, next to the stage that they belong
// to.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "sm90/mainloop/scaled_config.h"
#include "types.h"

namespace jgg::sm90 {

// Two warps copy the scales of each step, as many steps ahead as there are stages. Consumers have
// no registers to spare for this. The scales of a row need no alignment, because each copy is of
// one scale. Only copy4() copies four, which must be aligned.
class ScaleLoader {
 public:
  __device__ static void copy(float* to, float const* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                 "l"(from)
                 : "memory");
  }

  __device__ static void copy_or_zero(float* to, float const* from, bool exists) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
        "l"(from), "r"(exists ? 4 : 0)
        : "memory");
  }

  __device__ static void copy4(float* to, float const* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                 "l"(from)
                 : "memory");
  }

  // Every thread arrives once all of its copies are complete.
  __device__ static void arrive(Barrier& barrier) { barrier.arrive_after_copies(); }
  static constexpr int kArrivals = kScaleThreads;

  // Copies the scales of kTileM rows. Rows past `last_row` have no scales and get the scale of
  // `last_row`.
  template <int kTileM>
  __device__ static void copy_rows(RowScales const& scales, float const* block, int row,
                                   int last_row, float* to) {
#pragma unroll
    for (int i = threadIdx.x % kScaleThreads; i < kTileM; i += kScaleThreads) {
      copy(to + i, block + int64_t(min(row + i, last_row)) * scales.row_stride);
    }
  }
};

}  // namespace jgg::sm90
