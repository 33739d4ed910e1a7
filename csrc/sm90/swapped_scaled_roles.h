// The roles of FP8 kernels for groups of few rows: a thread copies, two warps bring scales, two
// warpgroups multiply and store.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "sm90/mainloop/swapped_scaled.h"
#include "sm90/scaled_loading.h"
#include "sm90/tile_roles.h"

namespace jgg::sm90 {

// Prefetches what a block reads first from device memory. Each of these reads waits for the
// previous one, but prefetches all run at once.
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

template <class Problem>
struct SwappedScaledRoles : ScaledLoading<TileRoles<Problem>, SwappedScaledMainloop<Problem>,
                                          SwappedScaledStorage<typename Problem::Config>> {
  static_assert(SwappedScaledProblem<Problem>);
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SwappedScaledStorage<Config>;
  using Mainloop = SwappedScaledMainloop<Problem>;
  using Base = ScaledLoading<TileRoles<Problem>, Mainloop, Shared>;
  static constexpr Registers kRegisters{40, 64};  // a block starts with 56 for each thread
  static constexpr int kBlocks = kSwappedBlocks;
  static_assert(sizeof(Shared) <= Config::kSharedMemory, "the stages leave no room for the ring");

  __device__ static void initialize(Params const& params, Shared& shared) {
    prefetch_first(params);
    Base::initialize(params, shared);
  }

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    SwappedEpilogue<Config> const epilogue(shared, params.out, params.out_type, consumer);
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      with_rows<Config::kTileM>(rows_of<Config>(work), [&](auto rows) {
        Mainloop::template compute<rows.value>(params, work, shared, stage, consumer, epilogue);
      });
    });
    epilogue.wait();
  }
};

}  // namespace jgg::sm90
