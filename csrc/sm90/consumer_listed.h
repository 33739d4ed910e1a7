// Consumers of lists of problems. They take tiles of two widths, and their epilogue may scale and
// add.
#pragma once

#include "sm90/consumer.h"

namespace jgg::sm90 {

// The loop over tiles.
template <class Problem, class Mainloop, class Shared>
__device__ void consume_listed(typename Problem::Params const& params, Shared& shared,
                               int consumer) {
  using Config = typename Problem::Config;
  static_assert(EpilogueOfLists<typename Problem::Epilogue, typename Mainloop::Accumulators>);
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

}  // namespace jgg::sm90
