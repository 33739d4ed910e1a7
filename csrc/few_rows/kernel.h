// The persistent kernel of products for groups of few rows: a warp schedules, a thread copies
// matrices, two warps bring rows, and four multiply and store.
#pragma once

#include "few_rows/epilogue.h"
#include "few_rows/loads.h"
#include "few_rows/multiply.h"
#include "scheduler/ragged_schedule.h"

namespace jgg::few_rows {

template <class Config>
__device__ void initialize(SharedStorage<Config>& shared) {
  for (int i = 0; i < Config::kStages; ++i) {
    shared.full[i].init(1 + kRowThreads);
    shared.empty[i].init(kConsumerWarps);
  }
  for (int i = 0; i < kWorkStages; ++i) {
    shared.work_full[i].init(1);
    shared.work_empty[i].init(1 + kRowWarps + kConsumerWarps);
  }
  cutlass::arch::fence_barrier_init();
}

// All sizes at once: a schedule that walks over many groups would wait for memory once for
// every 32.
template <class Config>
__device__ GroupSizes read_sizes(GroupSizes groups, SharedStorage<Config>& shared) {
  if (groups.groups > kGroupsAtOnce) return groups;
  int const lane = threadIdx.x % kWarpSize;
#pragma unroll 4
  for (int i = lane; i < groups.groups; i += kWarpSize) shared.sizes[i] = __ldg(groups.sizes + i);
  if (lane == 0) shared.offset = __ldg(groups.offset);
  __syncwarp();
  groups.sizes = shared.sizes;
  groups.offset = &shared.offset;
  return groups;
}

template <class Config>
__device__ void schedule_tiles(Params const& params, SharedStorage<Config>& shared) {
  GroupSizes const groups = read_sizes(params.groups, shared);
  NoncontractingSchedule<DeviceWarp, Config::kTileM, Config::kTileN, Config::kTileK, 1> schedule(
      groups, params.n, params.k);
  RoundRobin turns(blockIdx.x, gridDim.x);
  sm90::WorkIterator slot;
  bool more = true;
  while (more) {
    int const unit = turns.next(schedule);
    shared.work_empty[slot.stage].wait(slot.phase ^ 1);
    WorkTile& work = shared.work[slot.stage];
    more = schedule.tile(unit, 0, work);
    if (DeviceWarp::leads()) {
      if (!more) work.k_tiles = sm90::kNoMoreWork;
      shared.work_full[slot.stage].publish();
    }
    ++slot;
  }
}

template <class Config>
__device__ void compute(Params const& params, SharedStorage<Config>& shared, WorkTile const& work,
                        sm90::StageIterator<Config::kStages>& stage, Places<Config> const& places,
                        int warp) {
  if (work.k_tiles == 0) {
    return store_zeros<Config>(params, work, threadIdx.x - kFirstConsumer * kWarpSize,
                               kConsumerWarps * kWarpSize);
  }
  Epilogue<Config> const epilogue(params, work, warp);
  with_blocks<Config::kTileM / kMmaRows>(uniform(work.extent - work.m), [&](auto blocks) {
    Sums<blocks.value> sums = {};
    multiply<Config, blocks.value>(shared, work.k_tiles, stage, places, sums);
    epilogue.template store<blocks.value>(sums);
  });
}

template <class Config>
__global__ void __launch_bounds__(kThreads, kBlocks)
    few_rows_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(dynamic_shared);
  if (threadIdx.x == 0) initialize(shared);
  __syncthreads();

  int const warp = uniform(threadIdx.x / kWarpSize);
  if (warp == 1) return schedule_tiles(params, shared);
  if (warp == 0) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if (DeviceWarp::leads()) load_matrices<Config>(params, shared, work, stage);
      __syncwarp();
    });
  } else if (warp < kFirstConsumer) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      load_rows<Config>(params, shared, work, stage);
    });
  } else {
    int const consumer = warp - kFirstConsumer;
    Places<Config> const places(consumer);
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      compute<Config>(params, shared, work, stage, places, consumer);
      __syncwarp();
    });
  }
}

}  // namespace jgg::few_rows
