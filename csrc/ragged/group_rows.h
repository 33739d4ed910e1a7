// The base of noncontracting products: tiles of the result are rows of one group.
#pragma once

#include "scheduler/ragged_schedule.h"
#include "scheduler/stream_k_schedule.h"
#include "sm90/epilogue/cooperative.h"

namespace jgg::sm90 {

// Params have `groups`, `k`, `n`, and the `store_shift` of the result's descriptor.
template <class Config, bool kSharesLhs = false>
struct GroupRows {
  template <class Warp>
  using Schedule = NoncontractingSchedule<Warp, Config::kTileM, Config::kTileN, Config::kTileK,
                                          Config::kCluster, /*kAlign=*/1, kSharesLhs>;
  template <class Warp>
  using Turns = RoundRobin;

  template <class Warp, class Params>
  __device__ static Schedule<Warp> schedule(Params const& params) {
    return Schedule<Warp>(params.groups, params.n, params.k);
  }

  template <class Params>
  __device__ static auto piece_schedule(Params const& params, int cluster, int clusters) {
    return StreamKSchedule<DeviceWarp, Config::kTileM, Config::kTileN, Config::kTileK,
                           Config::kCluster>(params.groups, params.n, params.k, cluster, clusters);
  }

  template <class Params>
  __device__ static int rows_left(Params const&, WorkTile const& work) {
    return work.extent - work.m;
  }

  template <class Params>
  __device__ static StoreHint store_hint(Params const&) {
    return StoreHint::kNormal;
  }

  template <class Params>
  __device__ static StoreCoordinates store_at(Params const& params, WorkTile const& work, int row) {
    int const end = work.batch * params.groups.rows + work.begin + work.extent;
    return {work.n, params.store_shift - work.extent + work.m + row, end};
  }

  // Returns an upper bound of the number of units. The number itself depends on the group sizes.
  template <class Arguments>
  static int64_t max_units(Arguments const& a) {
    int64_t const row_tiles = ceil_div(a.groups.rows, Config::kTileM) + int64_t(a.groups.groups);
    return a.groups.batches * row_tiles * ceil_div(a.n, Config::kTileN);
  }
};

}  // namespace jgg::sm90
