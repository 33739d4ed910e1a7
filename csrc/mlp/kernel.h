// The persistent kernel with an epilogue that the problem brings: see sm90/kernel.h.
#pragma once

#include "sm90/kernel.h"
#include "sm90/persistent_launch.h"

namespace jgg::mlp {

template <class Problem, class Mainloop, class Shared>
__device__ void consume_tiles(typename Problem::Params const& params, Shared& shared,
                              int consumer) {
  using Config = typename Problem::Config;
  typename Mainloop::Accumulators accumulators;
  typename Problem::Epilogue epilogue(shared, params, consumer);
  sm90::StageIterator<Config::kStages> stage;
  int const first_row = consumer * sm90::kRowsPerConsumer;
  // One number instead of the two of an iterator: registers are all in use.
  for (int tile = 0;; ++tile) {
    sm90::WorkIterator slot;
    slot.stage = tile % sm90::kWorkStages;
    slot.phase = tile / sm90::kWorkStages % 2;
    shared.work_full[slot.stage].wait(slot.phase);
    // The tile stays in its slot until it is done: there are no registers for all that an epilogue
    // wants to know of it.
    WorkTile const& work = shared.work[slot.stage];
    WorkTile steps{};
    steps.k_tiles = uniform(work.k_tiles);
    if (steps.k_tiles == sm90::kNoMoreWork) {
      release_work(shared, slot);
      break;
    }
    bool const has_rows = uniform(Problem::rows_left(params, work)) > first_row;
    if (has_rows && steps.k_tiles > 0) {
      Mainloop::multiply(params, steps, shared, stage, consumer, accumulators, [&](int step) {
        if (Problem::Epilogue::stores_in(step, steps.k_tiles)) epilogue.store_next();
      });
      epilogue.store_rest();
      epilogue.take(accumulators, work);
    } else {
      Mainloop::skip(steps, shared, stage);
      epilogue.store_rest();
      if (has_rows) epilogue.take_zeros(work);
    }
    release_work(shared, slot);
  }
  epilogue.store_rest();
  epilogue.wait();
}

template <class Problem, class Loop = sm90::Mainloop<Problem>>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    mlp_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = sm90::aligned_storage<Config>(dynamic_shared);
  int const rank = sm90::rank_in_cluster<Config>();

  sm90::initialize_barriers<Loop>(shared);
  sm90::sync_cluster<Config>();
  int const warpgroup = uniform(threadIdx.x / sm90::kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<sm90::kProducerRegisters>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) sm90::produce<Problem, Loop>(params, shared, rank);
    if (warp == 1) sm90::schedule_tiles<Problem>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<sm90::kConsumerRegisters>();
    consume_tiles<Problem, Loop>(params, shared, warpgroup - 1);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sm90::sync_cluster<Config>();
}

// Launches `kernel`, mlp_kernel or the one of the ragged products.
template <class Problem, class Arguments>
cudaError_t launch(void (*kernel)(typename Problem::Params), Arguments const& arguments,
                   cudaStream_t stream) {
  typename Problem::Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  return sm90::launch_persistent<typename Problem::Config>(kernel, params,
                                                           Problem::max_units(arguments), stream);
}

}  // namespace jgg::mlp
