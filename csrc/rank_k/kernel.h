// The persistent kernel of rank-k and rank-2k updates: the roles of sm90/kernel.h with consumers of
// its own, for tiles of two widths and results with two places.
#pragma once

#include "rank_k/epilogue.h"
#include "rank_k/problem.h"
#include "sm90/kernel.h"

namespace jgg::sm90 {

template <class Problem, class Mainloop, class Shared>
__device__ void consume_triangle(typename Problem::Params const& params, Shared& shared,
                                 int consumer) {
  using Config = typename Problem::Config;
  TriangularEpilogue<Problem> epilogue(shared, params, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  auto const multiply = [&](auto accumulators, WorkTile const& work) {
    Mainloop::multiply(params, work, shared, stage, consumer, accumulators,
                       [&](int) { epilogue.store_next(); });
    epilogue.store_rest();
    epilogue.take(accumulators, work);
  };
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) break;
    if (work.m + consumer * kRowsPerConsumer >= work.extent) {
      Mainloop::skip(work, shared, stage);
      continue;
    }
    epilogue.prefetch(work);
    if (Problem::columns_needed(params, work) <= Config::kRhsBoxColumns) {
      multiply(typename Mainloop::template FirstColumns<Config::kRhsBoxColumns>{}, work);
    } else {
      multiply(typename Mainloop::Accumulators{}, work);
    }
    epilogue.store_diagonal();
  }
  epilogue.store_rest();
  epilogue.wait();
}

template <class Problem>
__global__ void __launch_bounds__(kThreads, 1)
    rank_k_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  using Loop = Mainloop<Problem>;
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(
      (reinterpret_cast<uintptr_t>(dynamic_shared) + 1023) / 1024 * 1024);
  int const rank = rank_in_cluster<Config>();

  initialize_barriers<Loop>(shared);
  sync_cluster<Config>();

  int const warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) produce<Problem, Loop>(params, shared, rank);
    if (warp == 1) schedule_tiles<Problem>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume_triangle<Problem, Loop>(params, shared, warpgroup - 1);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
