// The mainloop of symmetric updates. It differs from sm90/mainloop/cooperative.h only in narrow
// tiles on the diagonal.
#pragma once

#include "sm90/mainloop/cooperative.h"

namespace jgg::sm90 {

// A narrow tile on the diagonal multiplies rows by themselves, so its lhs is its rhs. A step of
// such a tile takes half of the rhs that a stage has room for. A stage therefore holds two steps of
// the tile, one in each box of the rhs. Multiplying a stage then takes as long as in a full tile,
// and as many bytes are under way.
template <class Problem>
class TriangularMainloop : public CooperativeMainloop<Problem> {
  using Base = CooperativeMainloop<Problem>;
  using Config = typename Base::Config;
  using Element = typename Base::Element;
  using Shared = typename Base::Shared;
  using Stage = typename Base::Stage;
  using Params = typename Base::Params;
  static_assert(Problem::kBoxRows == Config::kRhsBoxColumns);

 public:
  __device__ static void load(Params const& params, WorkTile const& work, Shared& shared,
                              Stage& stage, int rank) {
    if (!Problem::shares_rows(params, work)) return Base::load(params, work, shared, stage, rank);
    for (int step = 0; step < work.k_tiles; ++step, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(Config::kRhsBytes);
      BoxLoader<Config::kCluster> const loader(full.address(), rank);
      auto* rhs = reinterpret_cast<uint8_t*>(shared.rhs[stage.stage]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Problem::load_rhs(params, work, (2 * (work.first_step + step) + half) * Config::kTileK, 0,
                          loader, rhs + half * Config::kRhsBoxBytes, half, false);
      }
    }
  }

  template <class Accumulators, class Overlap>
  __device__ static void multiply(Params const& params, WorkTile const& work, Shared& shared,
                                  Stage& stage, int consumer, Accumulators& accumulators,
                                  Overlap&& overlap) {
    if constexpr (kColumnsOf<Accumulators> == Config::kRhsBoxColumns) {
      if (Problem::shares_rows(params, work)) {
        return multiply_narrow(params, work, shared, stage, consumer, accumulators, overlap);
      }
    }
    Base::multiply(params, work, shared, stage, consumer, accumulators, overlap);
  }

 private:
  template <class Accumulators, class Overlap>
  __device__ static void multiply_narrow(Params const& params, WorkTile const& work, Shared& shared,
                                         Stage& stage, int consumer, Accumulators& accumulators,
                                         Overlap&& overlap) {
    using namespace cute;
    typename Base::template Mma<kColumnsOf<Accumulators>> mma;
    // The rows of the lhs are in the first stage of the rhs.
    auto const first_lhs =
        advance(Base::lhs_descriptors(mma, shared, consumer), Config::kStages * Config::kLhsBytes);
    auto const first_rhs = Base::template rhs_descriptors<kColumnsOf<Accumulators>>(mma, shared);
    // In a rank-2k update the two boxes hold B and A.
    int const other_box = params.two_products ? Config::kRhsBoxBytes : 0;
    Stage finished = stage;
    for (int step = 0; step < work.k_tiles; ++step) {
      shared.full[stage.stage].wait(stage.phase);
      auto const lhs_boxes = advance(first_lhs, stage.stage * Config::kRhsBytes);
      auto const rhs_boxes = advance(first_rhs, stage.stage * Config::kRhsBytes);
      warpgroup_fence_operand(accumulators);
      warpgroup_arrive();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const box = half * Config::kRhsBoxBytes;
        auto const lhs = advance(lhs_boxes, box ^ other_box);
        auto const rhs = advance(rhs_boxes, box);
        issue_step(mma, lhs, rhs, step == 0 && half == 0, accumulators);
      }
      warpgroup_commit_batch();
      warpgroup_fence_operand(accumulators);

      overlap(step);
      warpgroup_wait<1>();
      if (step > 0) {
        Base::release(shared, finished.stage);
        ++finished;
      }
      ++stage;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulators);
    Base::release(shared, finished.stage);
  }
};

}  // namespace jgg::sm90
