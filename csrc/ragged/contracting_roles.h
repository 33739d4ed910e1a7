// The roles of a contracting product, which is two kernels in one: one for whole tiles, one for cut
// tiles. The group sizes choose between them. If whole tiles can be dealt evenly to all clusters,
// the kernel for whole tiles runs as if the other kernel were not there.
#pragma once

#include "ragged/zeros.h"
#include "scheduler/skew.h"
#include "sm90/piece_roles.h"

namespace jgg::sm90 {

// Returns the cycles from the start of a chunk of zeros to the start of the block's next chunk. At
// this pace, writing all zeros takes nearly as long as the products.
template <class Config>
__device__ inline unsigned cycles_a_chunk(SkewedWork const& work, ResultMatrices const& results) {
  // The time of a step is proportional to the width of its tile.
  constexpr float kCyclesAStep = 900 * Config::kTileN / 256;
  float const chunks = float(work.empty) * float(chunks_of(results)) / float(gridDim.x);
  return static_cast<unsigned>(float(work.steps) * kCyclesAStep / max(chunks, 1.0f));
}

// `Whole` is the product in whole tiles, and `Cut` is the same product in pieces. Their tiles may
// have different sizes.
template <class Whole, class Cut>
struct ContractingParams {
  typename Whole::Params whole;
  typename Cut::Params cut;
};

template <class Whole, class WholeLoop, class Cut>
struct ContractingRoles {
  using WholeRoles = WholeTileRoles<Whole, WholeLoop>;
  using CutRoles = PieceRoles<Cut, CooperativeMainloop<typename Cut::Whole>>;
  using Config = typename Whole::Config;
  using Params = ContractingParams<Whole, Cut>;
  static constexpr int kThreads = sm90::kThreads;
  static constexpr int kBlocks = 1;
  static_assert(Config::kCluster == Cut::Config::kCluster);

  struct Shared {
    union {
      typename WholeRoles::Shared whole;
      typename CutRoles::Shared cut;
    };
    SkewedWork work;
    bool is_skewed;
    unsigned zeros_taken;
  };

  __device__ __forceinline__ static void run(Params const& params, Shared& shared, int rank) {
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 1) {
      SkewedWork work;
      bool const skewed = Cut::is_skewed(params.cut, work);
      if (DeviceWarp::leads()) {
        shared.is_skewed = skewed;
        shared.work = work;
        shared.zeros_taken = 0;
      }
    }
    __syncthreads();
    if (shared.is_skewed) {
      CutRoles::initialize(params.cut, shared.cut);
      sync_cluster<Config>();
      run_roles<CutRoles>(params.cut, shared.cut, rank, shared.work.cuts);
      if constexpr (!Cut::kAdds) {
        // All warps write zeros after their roles. Warps without a role write from the start, so
        // they pace themselves.
        bool const is_idle = !kGathersLhs<Cut> && (warp == 2 || warp == 3);
        write_zeros(
            params.cut.groups, params.cut.results, &shared.zeros_taken,
            is_idle ? cycles_a_chunk<typename Cut::Config>(shared.work, params.cut.results) : 0);
      }
    } else {
      WholeRoles::initialize(params.whole, shared.whole);
      sync_cluster<Config>();
      run_roles<WholeRoles>(params.whole, shared.whole, rank);
    }
    // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
    sync_cluster<Config>();
  }
};

}  // namespace jgg::sm90
