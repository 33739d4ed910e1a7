// The roles of products for groups of few rows: a thread copies matrices, two warps bring rows, and
// four warps multiply and store.
#pragma once

#include "few_rows/epilogue.h"
#include "few_rows/loads.h"
#include "few_rows/multiply.h"
#include "few_rows/sizes.h"
#include "scheduler/ragged_schedule.h"
#include "sm90/dependent_launch.h"

namespace jgg::few_rows {

template <class Config>
__device__ void compute(Params const& params, SharedStorage<Config>& shared, WorkTile const& work,
                        sm90::StageIterator<Config::kStages>& stage, Places<Config> const& places,
                        int warp) {
  if (work.k_tiles == 0) {
    return store_zeros<Config>(params, work, threadIdx.x - kFirstConsumer * kWarpSize,
                               kConsumerWarps * kWarpSize, shared.groups.order);
  }
  int const columns = tile_columns<Config>(params) / kConsumerWarps;
  Epilogue<Config> const epilogue(params, work, warp * columns, shared.groups.order);
  with_blocks<Config::kTileM / kMmaRows>(uniform(work.extent - work.m), [&](auto blocks) {
    auto const terms = epilogue.template read<blocks.value>();
    Sums<blocks.value> sums = {};
    multiply<Config, blocks.value>(shared, work.k_tiles, stage, places, sums);
    epilogue.store(sums, terms);
  });
}

template <class Config_>
struct FewRowsRoles {
  using Config = Config_;
  using Params = few_rows::Params;
  using Shared = SharedStorage<Config>;
  static constexpr sm90::Registers kRegisters{};  // as launched, for two thread blocks
  static constexpr int kThreads = few_rows::kThreads;
  static constexpr int kBlocks = few_rows::kBlocks;
  static_assert(sizeof(Shared) <= kSharedMemory);

  __device__ static void initialize(Params const&, Shared& shared) {
    if (threadIdx.x == 0) {
      sm90::set_arrivals(shared.full, 1 + kRowThreads);
      sm90::set_arrivals(shared.empty, kConsumerWarps);
      sm90::set_arrivals(shared.work_full, 1);
      sm90::set_arrivals(shared.work_empty, 1 + kRowWarps + kConsumerWarps);
      sm90::fence_barriers();
    }
    sm90::let_next_begin();
  }

  __device__ static void load(Params const& params, Shared& shared, int) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if (DeviceWarp::leads()) load_matrices<Config>(params, shared, work, stage);
    });
  }

  __device__ static void schedule(Params const& params, Shared& shared, int) {
    GroupSizes const groups = read_groups(params.pairs.groups, params.groups, shared.groups);
    NoncontractingSchedule<DeviceWarp, Config::kTileM, Config::kTileN, Config::kTileK, 1> schedule(
        groups, params.columns, params.k);
    sm90::fill_ring<Config>(schedule, RoundRobin(blockIdx.x, gridDim.x), shared);
  }

  __device__ static void bring(Params const& params, Shared& shared, int, int warp) {
    if (warp == 1) sort_pairs(params.pairs.groups, params.groups, shared.groups);
    sm90::await_previous();
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      load_rows<Config>(params, shared, work, stage);
    });
  }

  __device__ static void consume(Params const& params, Shared& shared, int) {
    int const warp = uniform(threadIdx.x / kWarpSize) - kFirstConsumer;
    Places<Config> const places(warp, params.has_up);
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      compute<Config>(params, shared, work, stage, places, warp);
    });
  }
};

}  // namespace jgg::few_rows
