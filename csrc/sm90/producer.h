// The warp whose first thread loads operands by TMA.
#pragma once

#include "sm90/epilogue/previous_result.h"
#include "sm90/gather.h"
#include "sm90/lockstep.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// keeps_step() returns whether clusters begin any tiles of this launch together, and
// begins_together() whether they begin the given tile together.
template <class Problem>
__device__ bool keeps_step(typename Problem::Params const& params) {
  if constexpr (Problem::kKeepsStep) return params.keeps_step;
  return false;
}
template <class Problem>
__device__ bool begins_together(typename Problem::Params const& params, WorkTile const& work) {
  if constexpr (Problem::kKeepsStep) return params.keeps_step && Problem::is_whole(params, work);
  return false;
}

// Loads the boxes of a tile, and some of the lhs rows that the CTA loads itself (gather.h). A whole
// warp calls it.
template <class Problem, class Mainloop, class Shared, class Stage>
__device__ void load_beside_rows(typename Problem::Params const& params, WorkTile const& work,
                                 Shared& shared, Stage& stage, int rank, Lockstep& lockstep) {
  using Config = typename Problem::Config;
  if constexpr (Config::kLhsMajor == Major::kMN) {
    load_rhs_and_contracted_rows<Problem>(params, work, shared, stage, rank);
  } else {
    constexpr int kFirst = Config::kTileM - kRowsBesideRhs;
    if (work.k_tiles > 0) find_rows<Problem, kRowsBesideRhs>(params, work, shared, kFirst);
    __syncwarp();
    // This elects the same thread every time, as `lockstep` needs.
    if (cute::elect_one_sync()) {
      if (begins_together<Problem>(params, work)) lockstep.wait(work.k_tiles);
      bool const both = Problem::rows_left(params, work) > kRowsPerConsumer;
      Mainloop::load(params, work, shared, stage, rank, [&](int step, auto const& at) {
        if (both) load_found_rows<Problem, kRowsBesideRhs>(params, shared, at, kFirst, step);
      });
      if (keeps_step<Problem>(params)) lockstep.arrive();
    }
  }
}

template <class Problem, class Mainloop, class Shared>
__device__ void produce(typename Problem::Params const& params, Shared& shared, int rank) {
  using Config = typename Problem::Config;
  Lockstep lockstep(keeps_step<Problem>(params));
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    if constexpr (kGathersOwnRows<Problem>) {
      load_beside_rows<Problem, Mainloop>(params, work, shared, stage, rank, lockstep);
    } else if (threadIdx.x % kWarpSize == 0) {
      if (begins_together<Problem>(params, work)) lockstep.wait(work.k_tiles);
      Mainloop::load(params, work, shared, stage, rank);
      if (keeps_step<Problem>(params)) lockstep.arrive();
      if constexpr (Problem::kAdds) {
        if (Problem::adds_to(work)) {
          PreviousResult<Config>::load(params.out, Problem::store_at(params, work, 0), shared,
                                       stage);
        }
      }
    }
  });
}

}  // namespace jgg::sm90
