// The ring of work tiles, from the warp that schedules to all that read them.
#pragma once

#include "scheduler/warp.h"
#include "sm90/config.h"

namespace jgg::sm90 {

using WorkIterator = StageIterator<kWorkStages>;

// Steps of a tile that stands for the end of the schedule.
constexpr int kNoMoreWork = -1;

// Readers of a work tile: the producer warp and every warp of the consumers.
constexpr int kWorkReaders = 1 + kConsumers * kWarpgroup / kWarpSize;

// Gives a slot back that every thread of the warp has read.
template <class Shared>
__device__ void release_work(Shared& shared, WorkIterator& slot) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) shared.work_empty[slot.stage].arrive();
  ++slot;
}

template <class Shared>
__device__ WorkTile read_work(Shared& shared, WorkIterator& slot) {
  shared.work_full[slot.stage].wait(slot.phase);
  WorkTile work = shared.work[slot.stage];
  // Stages follow from it, and from stages the descriptors of WGMMA. With all numbers of the tile
  // in uniform registers, products with a K-major rhs were slower.
  work.k_tiles = uniform(work.k_tiles);
  release_work(shared, slot);
  return work;
}

}  // namespace jgg::sm90
