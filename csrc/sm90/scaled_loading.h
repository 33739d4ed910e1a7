// The loads of FP8 kernels: a thread copies operands, and two warps load scales.
#pragma once

#include "sm90/scales/gather.h"
#include "sm90/scales/producer.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// `Work` has the problem, and the schedule of its tiles or pieces: TileRoles, or a class derived
// from it.
template <class Work, class Mainloop, class Shared_>
struct ScaledLoading : Work {
  using Problem = typename Work::Problem;
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = Shared_;

  __device__ static void initialize(Params const&, Shared& shared) {
    if (threadIdx.x == 0) {
      set_arrivals(shared.full, 1);
      set_arrivals(shared.scales_full, ScaleLoader::kArrivals);
      set_arrivals(shared.empty, Mainloop::kEmptyArrivals);
      initialize_work(shared, 1 + kScaleThreads / kWarpSize);
      fence_barriers();
    }
    // If rhs has no block scales, its scales stay ones.
    constexpr int kScales = sizeof(shared.rhs_scales) / sizeof(float);
    for (int i = threadIdx.x; i < kScales; i += blockDim.x) shared.rhs_scales[0][i] = 1.0f;
  }

  __device__ static void load(Params const& params, Shared& shared, int rank) {
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if constexpr (kGathersLhs<Problem>) {
        load_weights_and_rows<Problem>(params, work, shared, stage, rank);
      } else {
        if (threadIdx.x % kWarpSize == 0) Mainloop::load(params, work, shared, stage, rank);
      }
    });
  }

  __device__ static void bring(Params const& params, Shared& shared, int, int) {
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if constexpr (kGathersLhs<Problem>) {
        bring_scales_and_rows<Problem>(params, work, shared, stage);
      } else if constexpr (Config::kStepScales) {
        bring_scales<Problem>(params, work, shared, stage);
      }
    });
  }
};

}  // namespace jgg::sm90
