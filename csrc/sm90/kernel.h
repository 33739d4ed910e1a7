// The shell of every persistent kernel: barriers, a warpgroup that brings work and operands, and
// those that multiply and store.
//
//   warpgroup  warp  role             registers           what it does
//   0          0     Roles::load      kRegisters.load     one thread fills stages by TMA
//   0          1     Roles::schedule  kRegisters.load     fills the ring of work tiles
//   0          2, 3  Roles::gather    kRegisters.load     rows by their numbers, if there are any
//                                                        (FP8: scales, by cp.async)
//   1, 2             Roles::consume   kRegisters.multiply WGMMA, fixup, epilogue
//
//   registers (load, multiply)        40, 232 whole tiles; 56, 224 pieces of tiles
//
//   barrier      arrivals that complete it
//   full         1 of the thread that loads, and the bytes of the stage
//   empty        each consumer (FP8: each of its warps) of each CTA of the cluster, as a multicast
//                fills the stage of all of them; where consumers take turns, the one whose tile it
//                is
//   scales_full  every thread of the warps that load scales
//   work_full    1 of the warp that schedules
//   work_empty   each warp that loads, and every warp of the consumers
//   free, full of fixup/exchange.h: 1 each, and the bytes of the sums
//
//   named barriers: barrier.h
//
// Kernels of FP8 products have a shell of their own, scaled_kernel.h, of the same roles: through
// this one, the compiler gives their additions other registers. Those for groups of few rows have
// warpgroups of other kinds: swapped_split_kernel.h, swapped_scaled_kernel.h. So have kernels of
// fine tiles, a block for each: rank_k/fine_kernel.h.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "scheduler/warp.h"
#include "sm90/cluster.h"
#include "sm90/concepts.h"
#include "sm90/config.h"

namespace jgg::sm90 {

// What every warp does once the barriers are there. `more` is what schedules are made of besides.
template <class Role, class Params, class Shared, class... More>
__device__ __forceinline__ void run_roles(Params const& params, Shared& shared, int rank,
                                          More const&... more) {
  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Role::kRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) Role::load(params, shared, rank);
    if (warp == 1) Role::schedule(params, shared, rank, more...);
    if constexpr (requires { Role::gather(params, shared, rank, warp); }) {
      if (warp >= 2) Role::gather(params, shared, rank, warp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Role::kRegisters.multiply>();
    Role::consume(params, shared, warpgroup - 1);
  }
}

template <Roles Role>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_kernel(const __grid_constant__ typename Role::Params params) {
  using Config = typename Role::Config;
  // As the widest swizzle wants it. Aligned at run time, it would be generic memory to the
  // compiler.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Role::Shared*>(dynamic_shared);
  int const rank = rank_in_cluster<Config>();

  Role::initialize(shared);
  sync_cluster<Config>();
  run_roles<Role>(params, shared, rank);
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
