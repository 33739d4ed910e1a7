// The persistent FP8 kernel: one warp schedules, one thread copies, two warps bring scales, two
// warpgroups multiply, scale and store.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/cluster.h"
#include "sm90/epilogue/scaled.h"
#include "sm90/mainloop/scaled.h"
#include "sm90/scales/producer.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// Readers of a work tile: the warps that copy or bring scales, and every warp of the consumers.
constexpr int kScaledWorkReaders = 1 + (kScaleThreads + kConsumers * kWarpgroup) / kWarpSize;

template <class Problem, class Shared>
__device__ void produce_scaled(typename Problem::Params const& params, Shared& shared, int rank) {
  StageIterator<Problem::Config::kStages> stage;
  WorkIterator slot;
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) return;
    if (threadIdx.x % kWarpSize == 0) {
      ScaledMainloop<Problem>::load(params, work, shared, stage, rank);
    }
    __syncwarp();
  }
}

template <class Problem, class Shared>
__device__ void produce_scales(typename Problem::Params const& params, Shared& shared) {
  StageIterator<Problem::Config::kStages> stage;
  WorkIterator slot;
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) return;
    if constexpr (Problem::Config::kStepScales) {
      bring_scales<Problem>(params, work, shared, stage);
    }
  }
}

template <class Problem, class Roles, class Shared>
__device__ void consume_scaled(typename Problem::Params const& params, Shared& shared,
                               int consumer) {
  using Config = typename Problem::Config;
  using Mainloop = ScaledMainloop<Problem>;
  using Epilogue = ScaledEpilogue<Config>;
  typename Epilogue::Sums sums = {};
  Epilogue epilogue(shared, params.out, params.out_type, consumer, Problem::store_hint(params));
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  int const first_row = consumer * kRowsPerConsumer;
  for (bool more = true; more; ++slot) {
    // The sums leave few registers: the tile stays in the ring and is read where it is needed.
    shared.work_full[slot.stage].wait(slot.phase);
    WorkTile const& work = shared.work[slot.stage];
    more = work.k_tiles != kNoMoreWork;
    int const rows = more ? uniform(Problem::rows_left(params, work)) : 0;
    int const k_tiles = uniform(work.k_tiles);
    bool is_result = more;
    if (rows > first_row && k_tiles > 0) {
      auto const store = [&](int slice) { epilogue.store(sums[slice], slice); };
      if constexpr (Config::kPromotes) {
        Mainloop::multiply(k_tiles, shared, stage, consumer, sums, store);
      } else {
        Mainloop::accumulate(k_tiles, shared, stage, consumer, sums, store);
      }
      is_result = Roles::complete(params, work, consumer, sums);
    } else {
      Mainloop::skip(work, shared, stage);
      epilogue.flush(sums);
    }
    if (is_result && Problem::rows_left(params, work) > first_row) {
      if constexpr (Config::kChannelScales) Problem::fetch_channel_scales(params, work, epilogue);
      epilogue.finish(Problem::store_at(params, work, first_row));
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) shared.work_empty[slot.stage].arrive();
  }
  epilogue.wait();
}

// What depends on whether work is whole tiles or pieces of them: who schedules it, with how many
// registers, and what becomes of the sums of a piece.
template <class Problem>
struct WholeScaledTiles {
  static constexpr Registers kRegisters = kTileRegisters;

  template <class Shared>
  __device__ static void schedule(typename Problem::Params const& params, Shared& shared, int) {
    schedule_tiles<Problem>(params, shared);
  }

  // Whether the sums are the result of a tile. If not, zeros are left of them.
  template <class Sums>
  __device__ static bool complete(typename Problem::Params const& params, WorkTile const& work, int,
                                  Sums& sums) {
    Problem::finish(params, work, sums);
    return true;
  }
};

// Where rhs has no block scales, these stay ones.
template <class Shared>
__device__ void initialize_scales(Shared& shared) {
  constexpr int kScales = sizeof(shared.rhs_scales) / sizeof(float);
  for (int i = threadIdx.x; i < kScales; i += blockDim.x) shared.rhs_scales[0][i] = 1.0f;
}

template <class Problem, class Shared>
__device__ void initialize_scaled_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Problem::Config::kStages; ++i) {
      shared.full[i].init(1);
      shared.scales_full[i].init(ScaleLoader::kArrivals);
      shared.empty[i].init(ScaledMainloop<Problem>::kEmptyArrivals);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      shared.work_full[i].init(1);
      shared.work_empty[i].init(kScaledWorkReaders);
    }
    cutlass::arch::fence_barrier_init();
  }
}

template <class Problem, class Roles>
__global__ void __launch_bounds__(kThreads, 1)
    scaled_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<ScaledStorage<Config>*>(dynamic_shared);
  int const rank = rank_in_cluster<Config>();

  initialize_scaled_barriers<Problem>(shared);
  initialize_scales(shared);
  sync_cluster<Config>();

  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Roles::kRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) produce_scaled<Problem>(params, shared, rank);
    if (warp == 1) Roles::schedule(params, shared, rank);
    if (warp >= 2) produce_scales<Problem>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Roles::kRegisters.multiply>();
    consume_scaled<Problem, Roles>(params, shared, warpgroup - 1);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
