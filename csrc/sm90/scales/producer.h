// The two warps that load scales.
#pragma once

#include "sm90/concepts.h"
#include "sm90/mainloop/scaled_config.h"
#include "sm90/scales/loader.h"
#include "sm90/scales/wide.h"

namespace jgg::sm90 {

template <class Problem, class Shared, class Stage>
__device__ void bring_wide_scales(typename Problem::Params const& params, WorkTile const& work,
                                  Shared& shared, Stage& stage) {
  if (work.k_tiles == 0) return;  // rows of no group, which have no scales of rhs
  // The scales of four steps are fetched at a time. The first of these steps is a multiple of four.
  constexpr int kSteps = WideScales<typename Problem::Config>::kSteps;
  int const first = Problem::first_step(work) % kSteps;
  auto scales = Problem::wide_scales(params, work, Problem::first_step(work) - first);
#pragma unroll 1
  for (int k_tile = first; k_tile < first + work.k_tiles; ++k_tile, ++stage) {
    // Fetch before waiting for the stage, because fetching takes long.
    if (k_tile == first || k_tile % kSteps == 0) scales.fetch();
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    scales.store(k_tile % kSteps, shared.lhs_scales[stage.stage], shared.rhs_scales[stage.stage]);
    shared.scales_full[stage.stage].arrive();
  }
}

// Loads the scales of a tile.
template <class Problem, class Shared, class Stage>
__device__ void bring_scales(typename Problem::Params const& params, WorkTile const& work,
                             Shared& shared, Stage& stage) {
  static_assert(LoadsScales<Problem>);
  if constexpr (Problem::kHasWideScales) {
    if (params.wide_scales) return bring_wide_scales<Problem>(params, work, shared, stage);
  }
#pragma unroll 1  // because registers are few
  for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    Problem::load_scales(params, work, k_tile, shared.lhs_scales[stage.stage],
                         shared.rhs_scales[stage.stage]);
    ScaleLoader::arrive(shared.scales_full[stage.stage]);
  }
}

}  // namespace jgg::sm90
