// The persistent kernel of a contracting product: two in one, of which the sizes choose. Groups
// that can be dealt to all clusters as whole tiles run what they would run without the other one.
#pragma once

#include "ragged/zeros.h"
#include "scheduler/skew.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

// Cycles from one chunk of zeros of a block to the next, so that they last nearly as long as the
// products.
__device__ inline unsigned cycles_a_chunk(SkewedWork const& work, ResultMatrices const& results) {
  constexpr float kCyclesAStep = 900;
  float const chunks = float(work.empty) * float(chunks_of(results)) / float(gridDim.x);
  return static_cast<unsigned>(float(work.steps) * kCyclesAStep / max(chunks, 1.0f));
}

// Shared memory whose barriers are there for all blocks of the cluster.
template <class Role>
__device__ typename Role::Shared& prepared_storage(uint8_t* dynamic_shared) {
  auto& shared = *reinterpret_cast<typename Role::Shared*>(dynamic_shared);
  Role::initialize(shared);
  sync_cluster<typename Role::Config>();
  return shared;
}

// `Whole` is the product in whole tiles, `Cut` the same in pieces; their tiles may differ.
template <class Whole, class Cut>
struct ContractingParams {
  typename Whole::Params whole;
  typename Cut::Params cut;
};

template <class Whole, class WholeLoop, class Cut>
__global__ void __launch_bounds__(kThreads, 1)
    contracting_kernel(const __grid_constant__ ContractingParams<Whole, Cut> params) {
  using Config = typename Whole::Config;
  using CutConfig = typename Cut::Config;
  static_assert(Config::kCluster == CutConfig::kCluster);
  using CutRoles = PieceRoles<Cut, CooperativeMainloop<typename Cut::Whole>>;
  using WholeRoles = WholeTileRoles<Whole, WholeLoop>;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  __shared__ bool is_skewed;
  __shared__ SkewedWork skewed_work;
  __shared__ unsigned zeros_taken;
  int const rank = rank_in_cluster<Config>();

  int const warp = threadIdx.x / kWarpSize;
  if (warp == 1) {
    SkewedWork work;
    bool const skewed = Cut::is_skewed(params.cut, work);
    if (DeviceWarp::leads()) {
      is_skewed = skewed;
      skewed_work = work;
      zeros_taken = 0;
    }
  }
  __syncthreads();
  if (is_skewed) {
    auto& shared = prepared_storage<CutRoles>(dynamic_shared);
    run_roles<CutRoles>(params.cut, shared, rank, skewed_work.cuts);
    if constexpr (!Cut::kAdds) {
      // All warps end here, those without a role at once.
      bool const is_idle = !kGathersLhs<Cut> && (warp == 2 || warp == 3);
      write_zeros(params.cut.groups, params.cut.results, &zeros_taken,
                  is_idle ? cycles_a_chunk(skewed_work, params.cut.results) : 0);
    }
  } else {
    auto& shared = prepared_storage<WholeRoles>(dynamic_shared);
    run_roles<WholeRoles>(params.whole, shared, rank);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
