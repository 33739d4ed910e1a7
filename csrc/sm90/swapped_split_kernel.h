// The persistent kernel for few rows: one warp schedules, one copies weights, a warpgroup brings
// rows, two multiply and store.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/kernel.h"
#include "sm90/mainloop/swapped_split.h"
#include "sm90/swapped.h"

namespace jgg::sm90 {

// Stores what a consumer has of a tile, 64 columns. WGMMA leaves a lane with rows 2 (lane % 4) and
// the next of its two columns of each 8 rows, and each warp with 16 columns.
template <class Config, int kSums>
__device__ void store_swapped(float const (&sums)[kSums], float* out, int pitch, int rows,
                              int columns, int consumer) {
  int const warp = threadIdx.x % kWarpgroup / kWarpSize, lane = threadIdx.x % kWarpSize;
  int const column = consumer * kColumnsPerConsumer + warp * 16 + column_of_lane();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    int const row = i / 4 * 8 + lane % 4 * 2 + i % 2, at = column + i / 2 % 2 * 8;
    if (row < rows && at < columns) out[int64_t(row) * pitch + at] = sums[i];
  }
}

template <class Mainloop, class Shared>
__device__ void initialize_swapped(Shared& shared) {
  if (threadIdx.x == 0) {
    Mainloop::initialize(shared);
    initialize_work(shared, Mainloop::kLoadingWarps);
    cutlass::arch::fence_barrier_init();
  }
}

template <class Problem>
__global__ void __launch_bounds__(kSplitThreads, 1)
    swapped_split_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  using Mainloop = SwappedSplitMainloop<Problem>;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<SwappedSplitStorage<Config>*>(dynamic_shared);

  initialize_swapped<Mainloop>(shared);
  __syncthreads();

  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) {
      for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
        Mainloop::load_weights(params, work, shared, stage);
        __syncwarp();
      });
    }
    if (warp == 1) schedule_tiles<Problem>(params, shared);
    return;
  }
  if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kRowRegisters>();
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      Mainloop::bring_rows(params, work, shared, stage);
      __syncwarp();
    });
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Config::kRegisters.multiply>();
  int const consumer = warpgroup - 2;
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    int const rows = rows_of<Config>(work);
    auto const compute = [&](auto most_rows) {
      typename Mainloop::template Sums<most_rows.value> sums = {};
      Mainloop::template multiply<most_rows.value>(work, shared, stage, consumer, sums);
      store_swapped<Config>(sums, Problem::out_at(params, work), params.n, rows, params.n - work.n,
                            consumer);
    };
    with_rows<Config::kTileM>(uniform(rows), compute);
    __syncwarp();
  });
}

}  // namespace jgg::sm90
