// The ring of work tiles: the warp that schedules fills it, and all other warps read it.
#pragma once

#include "scheduler/turns.h"
#include "scheduler/warp.h"
#include "sm90/cluster.h"
#include "sm90/concepts.h"
#include "sm90/config.h"

namespace jgg::sm90 {

using WorkIterator = StageIterator<kWorkStages>;

// `k_tiles` of a work tile that marks the end of the schedule.
constexpr int kNoMoreWork = -1;

// Readers of a work tile: warps that load, and every warp of the consumers.
constexpr int work_readers(int loading_warps) {
  return loading_warps + kConsumers * kWarpgroup / kWarpSize;
}

// One thread calls this.
template <class Shared>
__device__ void initialize_work(Shared& shared, int loading_warps) {
  set_arrivals(shared.work_full, 1);
  set_arrivals(shared.work_empty, work_readers(loading_warps));
}

// ---- the warp that schedules ----

// Keeps the ring full of whole tiles of the units that `turns` chooses, so that finding the next
// tile costs its readers nothing.
template <class Config, class Schedule, class Turns, class Shared>
__device__ __forceinline__ void fill_ring(Schedule& schedule, Turns turns, Shared& shared) {
  WorkIterator slot;
  bool more = true;
  while (more) {
    int const unit = turns.next(schedule);
    shared.work_empty[slot.stage].wait(slot.phase ^ 1);
    // Write the tile straight into shared memory, because this warp has no registers for a whole
    // tile, nor for the rank between two tiles.
    WorkTile& work = shared.work[slot.stage];
    more = schedule.tile(unit, rank_in_cluster<Config>(), work);
    if (DeviceWarp::leads()) {
      if (!more) work.k_tiles = kNoMoreWork;
      shared.work_full[slot.stage].arrive();
    }
    ++slot;
  }
}

template <class Problem, class Shared>
__device__ void schedule_tiles(typename Problem::Params const& params, Shared& shared) {
  static_assert(SchedulesTiles<Problem>);
  using Config = typename Problem::Config;
  auto schedule = Problem::template schedule<DeviceWarp>(params);
  with_turns<typename Problem::template Turns<DeviceWarp>>(
      schedule, blockIdx.x / Config::kCluster, gridDim.x / Config::kCluster,
      [&](auto turns) { fill_ring<Config>(schedule, turns, shared); });
}

// Fills the ring with the tiles or pieces of tiles that schedules find for one cluster. Unlike
// fill_ring(), it finds the next piece before waiting for a free slot. The two loops are separate,
// because a shared loop changed the machine code of the stream-K kernels.
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
      shared.work_full[slot.stage].arrive();
    }
    ++slot;
  }
}

// ---- the readers of the ring ----

// Gives back a slot once every thread of the warp has read it.
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
  // Only `k_tiles` goes to a uniform register, because stages follow from it, and descriptors
  // follow from stages. With all numbers of the tile there, products with a K-major rhs were
  // slower.
  work.k_tiles = uniform(work.k_tiles);
  release_work(shared, slot);
  return work;
}

// Returns the slot of a thread block's tile, by the tile's number. A loop that counts tiles keeps
// one number where an iterator keeps two, so it is for threads without a free register.
__device__ inline WorkIterator slot_of(int tile) {
  WorkIterator slot;
  slot.stage = tile % kWorkStages;
  slot.phase = tile / kWorkStages % 2;
  return slot;
}

// Calls `function(work, stage)` for each tile. The warp reconverges after each call.
template <class Config, class Shared, class Function>
__device__ __forceinline__ void for_each_tile(Shared& shared, Function&& function) {
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) return;
    function(work, stage);
    __syncwarp();
  }
}

}  // namespace jgg::sm90
