// The warp that schedules, where the last wave is cut along K.
#pragma once

#include "scheduler/assignment.h"
#include "sm90/kernel.h"

namespace jgg::sm90::stream_k {

// The schedule takes more registers than one of whole tiles.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

template <class Problem, class Shared>
__device__ void schedule_pieces(typename Problem::Params const& params, Shared& shared, int rank) {
  constexpr int kCluster = Problem::Config::kCluster;
  auto schedule = Problem::schedule(params, blockIdx.x / kCluster, gridDim.x / kCluster);
  WorkIterator slot;
  bool more = true;
  while (more) {
    WorkTile work;
    more = schedule.next(rank, work);
    shared.work_empty[slot.stage].wait(slot.phase ^ 1);
    if (DeviceWarp::leads()) {
      if (!more) work.k_tiles = kNoMoreWork;
      shared.work[slot.stage] = work;
      shared.work_full[slot.stage].publish();
    }
    ++slot;
  }
}

}  // namespace jgg::sm90::stream_k
