// The warp that schedules, where tiles are cut along K.
#pragma once

#include "scheduler/assignment.h"
#include "sm90/kernel.h"

namespace jgg::sm90 {

// The schedule takes more registers than one of whole tiles.
constexpr Registers kPieceRegisters{56, 224};

// `schedule_of(cluster, clusters)` is the schedule of one of the clusters.
template <class Config, class ScheduleOf, class Shared>
__device__ void schedule_pieces(ScheduleOf const& schedule_of, Shared& shared, int rank) {
  auto schedule = schedule_of(blockIdx.x / Config::kCluster, gridDim.x / Config::kCluster);
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

}  // namespace jgg::sm90
