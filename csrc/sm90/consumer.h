// The consumers: each multiplies its half of the rows of every tile, and stores this half.
#pragma once

#include "sm90/concepts.h"
#include "sm90/epilogue/cooperative.h"
#include "sm90/epilogue/previous_result.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// Returns whether a subtile of the previous tile is stored in step `step` of a tile of `steps`
// steps. Spreading the stores over the steps leaves L2 time for the loads, which are late when a
// tile begins.
__device__ inline bool stores_in(int step, int steps) {
  if (steps >= 32) return step % 4 == 3;
  return steps < 12 || step % 2 == 0;
}

// The loop over tiles, or over pieces of tiles if Fixup::kIsCut.
template <class Problem, class Mainloop, class Fixup, class Epilogue, class Shared>
__device__ void consume(typename Problem::Params const& params, Shared& shared, int consumer) {
  using Config = typename Problem::Config;
  using Accumulators = typename Mainloop::Accumulators;
  static_assert(StoresTiles<Problem> && sm90::Fixup<Fixup, Accumulators> &&
                sm90::Epilogue<Epilogue, Accumulators>);
  Accumulators accumulators;
  Epilogue epilogue(shared, params.out, consumer, Problem::store_hint(params));
  Fixup const fixup(params, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  int const first_row = consumer * kRowsPerConsumer;
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) break;
    bool const has_rows = uniform(Problem::rows_left(params, work)) > first_row;
    // For a stream-K piece, compute the store coordinates before the mainloop, so that `work` is
    // dead during it and frees registers.
    StoreCoordinates place;
    if constexpr (Fixup::kIsCut) place = Problem::store_at(params, work, first_row);
    auto const store = [&](auto const& finished) {
      if constexpr (Fixup::kIsCut) {
        epilogue.take(finished, place);
      } else {
        epilogue.take(finished, Problem::store_at(params, work, first_row));
      }
    };
    if (has_rows && work.k_tiles > 0) {
      Mainloop::multiply(params, work, shared, stage, consumer, accumulators, [&](int step) {
        if (!Problem::kSpreadsStores || stores_in(step, work.k_tiles)) epilogue.store_next();
      });
      epilogue.store_rest();
      if (!fixup.hands_over(work, accumulators)) {
        if constexpr (Problem::kAdds) {
          if (Fixup::kIsCut || Problem::adds_to(work)) {
            PreviousResult<Config>::template add<Mainloop>(shared, stage, consumer, accumulators);
          }
        }
        fixup.add(work, accumulators);
        store(accumulators);
      }
    } else {
      Mainloop::skip(work, shared, stage);
      if constexpr (Problem::kAdds) {
        if (Problem::adds_to(work)) PreviousResult<Config>::template skip<Mainloop>(shared, stage);
      } else {
        epilogue.store_rest();
        if (has_rows) store([](int) { return 0.0f; });
      }
    }
  }
  epilogue.store_rest();
  epilogue.wait();
}

}  // namespace jgg::sm90
