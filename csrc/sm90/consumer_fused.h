// Consumers whose epilogue does more with a tile than store it. Such an epilogue needs more data
// about the tile than registers can hold.
#pragma once

#include "sm90/consumer_pingpong.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

// The loop over tiles. A tile stays in its slot of the ring until it is done, so that `work` is
// read from shared memory where it is needed.
template <class Problem, class Mainloop, class Shared>
__device__ void consume_fused(typename Problem::Params const& params, Shared& shared,
                              int consumer) {
  using Config = typename Problem::Config;
  static_assert(FusedEpilogue<typename Problem::Epilogue, typename Mainloop::Accumulators>);
  typename Mainloop::Accumulators accumulators;
  typename Problem::Epilogue epilogue(shared, params, consumer);
  StageIterator<Config::kStages> stage;
  int const first_row = consumer * kRowsPerConsumer;
  for (int tile = 0;; ++tile) {
    WorkIterator slot = slot_of(tile);
    shared.work_full[slot.stage].wait(slot.phase);
    WorkTile const& work = shared.work[slot.stage];
    WorkTile steps{};
    steps.k_tiles = uniform(work.k_tiles);
    bool const has_rows = uniform(Problem::rows_left(params, work)) > first_row;
    bool const multiplies = has_rows && steps.k_tiles > 0;
    if (multiplies) {
      Mainloop::multiply(params, steps, shared, stage, consumer, accumulators, [&](int step) {
        if (Problem::Epilogue::stores_in(step, steps.k_tiles)) epilogue.store_next();
      });
    } else {
      Mainloop::skip(steps, shared, stage);
    }
    // Call the epilogue in one place for all tiles and for the end of the schedule, because it is a
    // lot of code.
    epilogue.store_rest();
    if (multiplies) {
      epilogue.take(accumulators, work);
    } else if (has_rows && steps.k_tiles != kNoMoreWork) {
      epilogue.take_zeros(work);
    }
    release_work(shared, slot);
    if (steps.k_tiles == kNoMoreWork) break;
  }
  epilogue.wait();
}

// The loop of consumers that take turns. The epilogue of one consumer takes as long as the products
// of the other consumer.
template <class Problem, class Mainloop, class Shared>
__device__ void consume_fused_in_turn(typename Problem::Params const& params, Shared& shared,
                                      int consumer) {
  using Config = typename Problem::Config;
  static_assert(FusedEpilogueInTurn<typename Problem::Epilogue, typename Mainloop::Accumulators>);
  typename Problem::Epilogue epilogue(shared, params, consumer);
  OrderBarrier const order(kMultiplyOrder, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;

  if (consumer == 1 && !pass_over(shared, slot, stage)) return;
  do {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) {
      order.wait();
      break;
    }
    epilogue.begin(work);
    if (work.k_tiles > 0) {
      // All groups have the same contracted dimension, and loads read zeros past its end. So all K
      // tiles are multiplied whole.
      WorkTile steps{};
      steps.k_tiles = work.k_tiles;
      steps.extent = work.k_tiles * Config::kTileK;
      typename Mainloop::Accumulators accumulators;
      cute::clear(accumulators);
      cute::warpgroup_fence_operand(accumulators);
      order.wait();
      Mainloop::multiply(steps, shared, stage, accumulators, [&] { order.pass(); });
      epilogue.store(accumulators);
    } else {
      order.wait();
      order.pass();
      epilogue.store_zeros();
    }
  } while (pass_over(shared, slot, stage));
  epilogue.wait();
}

// The roles of kernels of whole tiles whose epilogue does more with a tile than store it.
template <class Problem, class Mainloop>
struct FusedRoles : LoadingRoles<Problem, Mainloop> {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SharedStorage<Config>;
  static_assert(!Problem::kAdds);

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    if constexpr (Config::kTakesTurns) {
      consume_fused_in_turn<Problem, Mainloop>(params, shared, consumer);
    } else {
      consume_fused<Problem, Mainloop>(params, shared, consumer);
    }
  }
};

}  // namespace jgg::sm90
