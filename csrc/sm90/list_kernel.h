// The persistent kernel of lists of problems, whose descriptors are parameters of the kernel: the
// roles of sm90/kernel.h with consumers that take tiles of two widths and an epilogue that may
// scale and add.
#pragma once

#include "sm90/kernel.h"

namespace jgg::sm90 {

// The largest parameters of a kernel, since CUDA 12.1.
constexpr size_t kParameterLimit = 32764;

// `Problem::kHasNarrowTiles` says whether tiles of which half the columns suffice are multiplied as
// such, `kSpreadsStores` whether stores_in() chooses the steps in which the tile before is stored.
// `Problem::Shared` is the block's storage. `Problem::Epilogue` has, beside take(), store_next(),
// store_rest() and wait() of the ragged products' epilogue: initialize(shared) for its barriers,
// prefetch(work), which fetches what take() will need, and store_early(), which stores what cannot
// be deferred until the next tile is being multiplied.
template <class Problem, class Mainloop, class Shared>
__device__ void consume_list(typename Problem::Params const& params, Shared& shared, int consumer) {
  using Config = typename Problem::Config;
  typename Problem::Epilogue epilogue(shared, params, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  auto const multiply = [&](auto accumulators, WorkTile const& work) {
    Mainloop::multiply(params, work, shared, stage, consumer, accumulators, [&](int step) {
      if (!Problem::kSpreadsStores || stores_in(step, work.k_tiles)) epilogue.store_next();
    });
    epilogue.store_rest();
    epilogue.take(accumulators, work);
  };
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) break;
    int const columns = uniform(Problem::columns_needed(params, work));
    if (uniform(work.extent - work.m) <= consumer * kRowsPerConsumer || columns <= 0) {
      Mainloop::skip(work, shared, stage);
      continue;
    }
    epilogue.prefetch(work);
    if (!Problem::kHasNarrowTiles || columns > Config::kRhsBoxColumns) {
      multiply(typename Mainloop::Accumulators{}, work);
    } else if constexpr (Problem::kHasNarrowTiles) {
      multiply(typename Mainloop::template FirstColumns<Config::kRhsBoxColumns>{}, work);
    }
    epilogue.store_early();
  }
  epilogue.store_rest();
  epilogue.wait();
}

template <class Problem, class Loop = CooperativeMainloop<Problem>>
__global__ void __launch_bounds__(kThreads, 1)
    list_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  static_assert(sizeof(params) <= kParameterLimit);
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Problem::Shared*>(
      (reinterpret_cast<uintptr_t>(dynamic_shared) + 1023) / 1024 * 1024);
  int const rank = rank_in_cluster<Config>();

  if (threadIdx.x == 0) Problem::Epilogue::initialize(shared);
  initialize_barriers<Loop>(shared);
  sync_cluster<Config>();

  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kTileRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) produce<Problem, Loop>(params, shared, rank);
    if (warp == 1) schedule_tiles<Problem>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kTileRegisters.multiply>();
    consume_list<Problem, Loop>(params, shared, warpgroup - 1);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
