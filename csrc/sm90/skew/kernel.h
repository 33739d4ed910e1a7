// The persistent kernel of a contracting product: two in one, of which the sizes choose. Groups
// that can be dealt to all clusters as whole tiles run what they would run without the other one.
#pragma once

#include "scheduler/skew.h"
#include "sm90/kernel.h"
#include "sm90/skew/zeros.h"
#include "sm90/stream_k/kernel.h"

namespace jgg::sm90::skew {

// Cycles from one chunk of zeros of a block to the next, so that they last nearly as long as the
// products.
__device__ inline unsigned cycles_a_chunk(SkewedWork const& work, ResultMatrices const& results) {
  constexpr float kCyclesAStep = 900;
  float const chunks = float(work.empty) * float(chunks_of(results)) / float(gridDim.x);
  return static_cast<unsigned>(float(work.steps) * kCyclesAStep / max(chunks, 1.0f));
}

template <class Problem, class Mainloop>
__global__ void __launch_bounds__(kThreads, 1)
    contracting_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  extern __shared__ uint8_t dynamic_shared[];
  __shared__ bool is_skewed;
  __shared__ SkewedWork skewed_work;
  __shared__ unsigned zeros_taken;
  auto& shared = aligned_storage<Config>(dynamic_shared);
  int const rank = rank_in_cluster<Config>();

  // While another warp initialises the barriers, and before the schedule needs the sizes too.
  int const warp = threadIdx.x / kWarpSize;
  if (warp == 1) {
    SkewedWork work;
    bool const skewed = Problem::is_skewed(params, work);
    if (DeviceWarp::leads()) {
      is_skewed = skewed;
      skewed_work = work;
      zeros_taken = 0;
    }
  }
  initialize_barriers<Mainloop>(shared);
  sync_cluster<Config>();
  if (is_skewed) {
    stream_k::run_piece_roles<Problem, Mainloop>(
        params, shared, rank, [&](int cluster, int clusters) {
          return Problem::schedule(params, skewed_work.cuts, cluster, clusters);
        });
    // All warps end here, those without a role at once.
    bool const is_idle = warp == 2 || warp == 3;
    write_zeros(params.groups, params.results, &zeros_taken,
                is_idle ? cycles_a_chunk(skewed_work, params.results) : 0);
  } else {
    run_roles<typename Problem::Whole, Mainloop>(params, shared, rank);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90::skew
