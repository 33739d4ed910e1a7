// The persistent kernel for groups of few rows: one warp schedules, one or more bring what is to be
// multiplied, two warpgroups multiply and store.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_desc.hpp>

#include "sm90/kernel.h"
#include "sm90/mainloop/swapped_scaled.h"
#include "sm90/swapped.h"

namespace jgg::sm90 {

// What a block reads first comes from device memory, and each waits for the other: asked for now,
// all of it comes at once.
template <class Params>
__device__ void prefetch_first(Params const& params) {
  constexpr int kLine = 128 / sizeof(int);
  if (threadIdx.x == 0) cute::prefetch_tma_descriptor(&params.rhs);
  if (threadIdx.x == 1) cute::prefetch_tma_descriptor(&params.lhs);
  int const line = threadIdx.x - kWarpSize;
  if (line >= 0 && line < kWarpSize && line * kLine < params.groups.groups) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(params.groups.sizes + line * kLine));
  }
}

template <class Mainloop, class Shared>
__device__ void initialize_swapped_scaled(Shared& shared) {
  Mainloop::initialize(shared);
  if (threadIdx.x == 0) {
    initialize_work(shared, Mainloop::kLoadingWarps);
    cutlass::arch::fence_barrier_init();
  }
}

template <class Problem>
__global__ void __launch_bounds__(kThreads, kSwappedBlocks)
    swapped_scaled_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  using Mainloop = SwappedScaledMainloop<Problem>;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<SwappedScaledStorage<Config>*>(dynamic_shared);

  prefetch_first(params);
  initialize_swapped_scaled<Mainloop>(shared);
  __syncthreads();

  int const warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == kWarpgroup / kWarpSize - 1) {
      schedule_tiles<Problem>(params, shared);
    } else if (warp < Mainloop::kLoadingWarps) {
      for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
        Mainloop::load(params, work, shared, stage, warp);
        __syncwarp();
      });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kRegisters.multiply>();
    int const consumer = warpgroup - 1;
    SwappedEpilogue<Config> const epilogue(shared, params.out, params.out_type, consumer);
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      with_rows<Config::kTileM>(rows_of<Config>(work), [&](auto rows) {
        Mainloop::template compute<rows.value>(params, work, shared, stage, consumer, epilogue);
      });
      __syncwarp();
    });
    epilogue.wait();
  }
}

}  // namespace jgg::sm90
