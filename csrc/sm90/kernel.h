// The persistent kernel: one warp schedules, one thread copies, two warpgroups multiply and store.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "scheduler/warp.h"
#include "sm90/config.h"
#include "sm90/consumer_pingpong.h"
#include "sm90/epilogue/cooperative.h"
#include "sm90/epilogue/previous_result.h"
#include "sm90/lockstep.h"
#include "sm90/mainloop/cooperative.h"
#include "sm90/work.h"

namespace jgg::sm90 {

template <class Config>
__device__ int rank_in_cluster() {
  return Config::kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
}

// Whether a chunk of the tile before is stored in this step of a tile of so many. Spread over them,
// the stores leave L2 the time to keep up with the loads, which are late when a tile begins.
__device__ inline bool stores_in(int step, int steps) {
  if (steps >= 32) return step % 4 == 3;
  return steps < 12 || step % 2 == 0;
}

// Keeps the ring of work tiles full, so that finding the next tile costs its readers nothing.
template <class Problem, class Shared>
__device__ void schedule_tiles(typename Problem::Params const& params, Shared& shared) {
  using Config = typename Problem::Config;
  auto schedule = Problem::template schedule<DeviceWarp>(params);
  typename Problem::template Turns<DeviceWarp> turns(blockIdx.x / Config::kCluster,
                                                     gridDim.x / Config::kCluster);
  WorkIterator slot;
  bool more = true;
  while (more) {
    int const unit = turns.next(schedule);
    shared.work_empty[slot.stage].wait(slot.phase ^ 1);
    // Straight into shared memory: this warp's registers have no room for a whole tile, nor for the
    // rank between two tiles.
    WorkTile& work = shared.work[slot.stage];
    more = schedule.tile(unit, rank_in_cluster<Config>(), work);
    if (DeviceWarp::leads()) {
      if (!more) work.k_tiles = kNoMoreWork;
      shared.work_full[slot.stage].publish();
    }
    ++slot;
  }
}

// Whether clusters begin their tiles together: any of them, or this one.
template <class Problem>
__device__ bool keeps_step(typename Problem::Params const& params) {
  if constexpr (Problem::kKeepsStep) return params.keeps_step;
  return false;
}
template <class Problem>
__device__ bool begins_together(typename Problem::Params const& params, WorkTile const& work) {
  if constexpr (Problem::kKeepsStep) return params.keeps_step && Problem::is_whole(params, work);
  return false;
}

template <class Problem, class Mainloop, class Shared>
__device__ void produce(typename Problem::Params const& params, Shared& shared, int rank) {
  StageIterator<Problem::Config::kStages> stage;
  WorkIterator slot;
  Lockstep lockstep(keeps_step<Problem>(params));
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) return;
    if (threadIdx.x % kWarpSize == 0) {
      if (begins_together<Problem>(params, work)) lockstep.wait(work.k_tiles);
      Mainloop::load(params, work, shared, stage, rank);
      if (keeps_step<Problem>(params)) lockstep.arrive();
      if constexpr (Problem::kAdds) {
        if (Problem::adds_to(work)) {
          PreviousResult<typename Problem::Config>::load(
              params.out, Problem::store_at(params, work, 0), shared, stage);
        }
      }
    }
    __syncwarp();
  }
}

template <class Problem, class Mainloop, class Shared>
__device__ void consume(typename Problem::Params const& params, Shared& shared, int consumer) {
  using Config = typename Problem::Config;
  typename Mainloop::Accumulators accumulators;
  CooperativeEpilogue<Config> epilogue(shared, params.out, consumer, Problem::store_hint(params));
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  int const first_row = consumer * kRowsPerConsumer;
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) break;
    bool const has_rows = uniform(Problem::rows_left(params, work)) > first_row;
    auto const store = [&](auto const& values) {
      if constexpr (Problem::kHasHeads) {
        if (work.head > 0 && work.m + first_row == 0) {
          Problem::store_below_head(params, work, values);
          return;
        }
      }
      epilogue.take(values, Problem::store_at(params, work, first_row));
    };
    if (has_rows && work.k_tiles > 0) {
      Mainloop::multiply(params, work, shared, stage, consumer, accumulators, [&](int step) {
        // Masks leave no register for it.
        if (Problem::kMasksRows || stores_in(step, work.k_tiles)) epilogue.store_next();
      });
      if constexpr (Problem::kAdds) {
        if (Problem::adds_to(work)) {
          PreviousResult<Config>::template add<Mainloop>(shared, stage, consumer, accumulators);
        }
      }
      epilogue.store_rest();
      store(accumulators);
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

template <class Mainloop, class Config>
__device__ void initialize_barriers(SharedStorage<Config>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(Mainloop::kEmptyArrivals);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      shared.work_full[i].init(1);
      shared.work_empty[i].init(kWorkReaders);
    }
    cutlass::arch::fence_barrier_init();
  }
}

template <class Config>
__device__ void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }
}

template <class Config>
__device__ SharedStorage<Config>& aligned_storage(uint8_t* dynamic_shared) {
  return *reinterpret_cast<SharedStorage<Config>*>(
      (reinterpret_cast<uintptr_t>(dynamic_shared) + 1023) / 1024 * 1024);
}

// What every warp does once the barriers are there.
template <class Problem, class Mainloop, class Shared>
__device__ void run_roles(typename Problem::Params const& params, Shared& shared, int rank) {
  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kTileRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) produce<Problem, Mainloop>(params, shared, rank);
    if (warp == 1) schedule_tiles<Problem>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kTileRegisters.multiply>();
    if constexpr (Problem::Config::kTakesTurns) {
      consume_in_turn<Problem, Mainloop>(params, shared, warpgroup - 1);
    } else {
      consume<Problem, Mainloop>(params, shared, warpgroup - 1);
    }
  }
}

template <class Problem>
using DefaultMainloop = std::conditional_t<Problem::Config::kTakesTurns, PingpongMainloop<Problem>,
                                           CooperativeMainloop<Problem>>;

template <class Problem, class Mainloop>
__global__ void __launch_bounds__(kThreads, 1)
    ragged_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = aligned_storage<Config>(dynamic_shared);
  int const rank = rank_in_cluster<Config>();

  initialize_barriers<Mainloop>(shared);
  sync_cluster<Config>();
  run_roles<Problem, Mainloop>(params, shared, rank);
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
