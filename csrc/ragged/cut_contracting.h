// A contracting product that cuts tiles if its groups are too unequal.
#pragma once

#include "ragged/contracting.h"
#include "ragged/zeros.h"
#include "scheduler/contracting_pieces.h"
#include "scheduler/partial_sums.h"
#include "scheduler/skew.h"
#include "sm90/fixup/partial_sums.h"

namespace jgg::sm90 {

// `Whole_` is the product in whole tiles.
template <class Whole_>
struct CutContracting : Whole_ {
  using Whole = Whole_;
  using Config = typename Whole::Config;
  static constexpr bool kSpreadsStores = false;

  struct Params : Whole::Params {
    PartialSumsWorkspace workspace;
    ResultMatrices results;
  };

  // Returns whether there are group sizes for which tiles are cut.
  template <class Arguments>
  static bool can_be_skewed(Arguments const& a) {
    GroupSizes const groups = a.groups;
    decltype(Params::grid) const grid(groups, a.k, Whole::columns(a));
    return skew_of<SimulatedWarp>(groups, grid).is_possible();
  }

  // Returns whether tiles should be cut. If so, `work` receives the cuts. A whole warp calls it.
  __device__ static bool is_skewed(Params const& params, SkewedWork& work) {
    int const sums = static_cast<int>(params.workspace.slots) / (Config::kCluster * kConsumers);
    return skew_of<DeviceWarp>(params.groups, params.grid)
        .is_worth_cutting(gridDim.x / Config::kCluster, sums, work);
  }

  // Only the piece that stores a tile adds to the old result.
  __device__ static bool adds_to(WorkTile const& work) {
    return Whole::adds_to(work) && work.partials != kHandsOver;
  }

  // The schedule keeps a reference to `cuts`.
  __device__ static auto piece_schedule(Params const& params, ChainCuts const& cuts, int cluster,
                                        int clusters) {
    static_assert(kMaxClusters<Config> <= ChainCuts::kMostClusters);
    return ContractingPieces<DeviceWarp, Config::kTileM, Config::kTileN, Config::kTileK,
                             Config::kCluster>(params.groups, params.grid, cuts, cluster, clusters);
  }

  template <class Arguments>
  static cudaError_t make_params(Arguments const& a, Params& params) {
    params.workspace =
        PartialSumsWorkspace(a.workspace, a.workspace_bytes, PartialSums<Config>::kFloats);
    params.results = Whole::results(a);
    return Whole::make_params(a, params);
  }

 private:
  // Bytes that a multiprocessor writes during a K tile while all multiprocessors write: 21 KB with
  // 256 columns.
  static constexpr int kBytesAStep = (21 << 10) * Config::kTileN / 256;

  template <class Warp, class Grid>
  JGG_HOST_DEVICE static auto skew_of(GroupSizes const& groups, Grid const& grid) {
    constexpr int kBytes = Config::kTileM * Config::kTileN * sizeof(typename Config::Output);
    constexpr int kZerosCost = (kBytes + kBytesAStep - 1) / kBytesAStep;
    return Skew<Warp, Config::kTileK>(groups, grid.units, Whole::kAdds ? 0 : kZerosCost);
  }
};

}  // namespace jgg::sm90
