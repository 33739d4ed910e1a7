// The mainloop of symmetric updates in fine tiles: see scheduler/triangular_fine.h.
#pragma once

#include "sm90/mainloop/cooperative.h"

namespace jgg::sm90 {

// 64 rows of a stage. Strip i of the stage's lhs begins at row `m` + 64 i of the work tile, and
// strip i of the stage's rhs begins at row `n` + 64 i.
struct Strip {
  bool in_rhs;
  int index;

  __device__ int row(WorkTile const& work) const {
    return (in_rhs ? work.n : work.m) + index * kRowsPerConsumer;
  }
};

// A product of a consumer: the strip `lhs` times the strips from `rhs` on, as many as the
// accumulators have columns for.
template <class Accumulators_>
struct StripProduct {
  using Accumulators = Accumulators_;
  Strip lhs;
  Strip rhs;
  Accumulators& accumulators;
};

template <class Problem>
class FineMainloop : public CooperativeMainloop<Problem> {
  using Base = CooperativeMainloop<Problem>;
  using Config = typename Base::Config;
  using Element = typename Base::Element;
  using Shared = typename Base::Shared;
  using Stage = typename Base::Stage;
  using Params = typename Base::Params;
  static_assert(Problem::kBoxRows == Config::kTileN && Config::kCluster == 2);
  static_assert(Config::kStages % 2 == 0, "a pair of steps fills stages 2 i and 2 i + 1");

 public:
  // A whole warp calls this, so that the compiler knows that addresses are the same for all lanes.
  // A shared operand goes to both CTAs of the cluster at once, as one box. If both operands are
  // shared, each CTA loads one of them. If only one is shared, each CTA loads every other step of
  // it.
  __device__ static void load(Params const& params, WorkTile const& work, int rank, Shared& shared,
                              Stage& stage) {
    bool const both = work.share == Share::kBoth;
    bool const share_lhs = both || work.share == Share::kLhs;
    bool const share_rhs = both || work.share == Share::kRhs;
    // The loop is not unrolled, because the first steps wait for instructions too.
#pragma unroll 1
    for (int step = 0; step < work.k_tiles; ++step, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      if (!cute::elect_one_sync()) continue;
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(Config::kLhsBytes + Config::kRhsBytes);
      BoxLoader<Config::kCluster> const loader(full.address(), 0);
      int const k = step * Config::kTileK;
      bool const takes_turn = step % Config::kCluster == rank;
      if (both ? rank == 0 : takes_turn || !share_lhs) {
        Problem::load_lhs(params, work, k, 0, loader,
                          reinterpret_cast<uint8_t*>(shared.lhs[stage.stage]), 0, share_lhs);
      }
      if (both ? rank == 1 : takes_turn || !share_rhs) {
        Problem::load_rhs(params, work, k, 0, loader,
                          reinterpret_cast<uint8_t*>(shared.rhs[stage.stage]), 0, share_rhs);
      }
    }
  }

  // Computes one or two products in the same steps. `overlap()` is called while the tensor cores
  // are busy with the first one.
  //
  // The steps of a rank-2k update come in pairs. The first step of a pair has the rows at `m` of A
  // and the rows at `n` of B, and the second step has the rows at `m` of B and the rows at `n` of
  // A. So the other step of a pair has the same rows of the other operand.
  template <class Overlap, class... Products>
  __device__ static void multiply(Params const& params, WorkTile const& work, Shared& shared,
                                  Stage& stage, Overlap const& overlap, Products... products) {
    bool const pairs = Problem::pairs_steps(params, work);
    // Without B A^T, A is in the lhs of even steps and in the rhs of odd steps, so both steps of a
    // pair are multiplied at once.
    bool const at_once = pairs && params.one_product;
    multiply_described(uniform(pairs ? 1 : 0), uniform(at_once ? 2 : 1), work.k_tiles, shared,
                       stage, overlap, describe(shared, products, at_once)...);
  }

 private:
  // The descriptors of a product's strips in the first stage.
  template <class TiledMma, class Lhs, class Rhs, class Accumulators>
  struct Described {
    TiledMma mma;
    Lhs lhs;
    Rhs rhs;
    bool rhs_is_paired;
    int lhs_stage;  // which of the stages of an iteration has the lhs
    Accumulators& accumulators;

    __device__ void issue(int first_stage, int pair, int step) {
      int const stage = first_stage + lhs_stage;
      int const other = rhs_is_paired ? stage ^ pair : stage;
      auto const lhs = advance(this->lhs, stage * Config::kLhsBytes);
      auto const rhs = advance(this->rhs, other * Config::kLhsBytes);
      issue_step(mma, lhs, rhs, step == 0, accumulators);
    }
  };

  template <class Product>
  __device__ static auto describe(Shared& shared, Product const& product, bool at_once) {
    using Accumulators = typename Product::Accumulators;
    using TiledMma = typename Base::template Mma<kColumnsOf<Accumulators>>;
    static_assert(Config::kLhsBytes == Config::kRhsBytes);
    constexpr int kLhsToRhs = Config::kStages * Config::kLhsBytes;
    auto const offset = [](Strip strip, int from) {
      return strip.index * kRowsPerConsumer * kRowBytes + (strip.in_rhs ? kLhsToRhs : 0) - from;
    };
    TiledMma const mma;
    auto const lhs =
        advance(Base::lhs_descriptors(mma, shared, 0), uniform(offset(product.lhs, 0)));
    auto const rhs = advance(Base::template rhs_descriptors<kColumnsOf<Accumulators>>(mma, shared),
                             uniform(offset(product.rhs, kLhsToRhs)));
    return Described<TiledMma, decltype(lhs), decltype(rhs), Accumulators>{
        mma,
        lhs,
        rhs,
        product.lhs.in_rhs == product.rhs.in_rhs,
        uniform(at_once && product.lhs.in_rhs ? 1 : 0),
        product.accumulators};
  }

  template <class Overlap, class... Products>
  __device__ static void multiply_described(int pair, int steps_at_once, int steps, Shared& shared,
                                            Stage& stage, Overlap const& overlap,
                                            Products... products) {
    using namespace cute;
    Stage finished = stage;
    int released = 0;
    for (int step = 0; step < steps; step += steps_at_once) {
      shared.full[stage.stage].wait(stage.phase);
      shared.full[stage.stage ^ pair].wait(stage.phase);
      (warpgroup_fence_operand(products.accumulators), ...);
      warpgroup_arrive();
      (products.issue(stage.stage, pair, step), ...);
      warpgroup_commit_batch();
      (warpgroup_fence_operand(products.accumulators), ...);

      if (step == 0) overlap();
      // The older one of the two steps in flight is done. The last kStages releases are skipped,
      // because a CTA may end before its peer and then has no shared memory to arrive at. The peer
      // waits for all earlier releases before it loads into their stages again, and the wait for
      // `full` above waits for every multicast. So nothing is on its way to a CTA that has ended.
      warpgroup_wait<1>();
#pragma unroll 1
      for (; released < min(step & ~pair, steps - Config::kStages); ++released, ++finished) {
        Base::release(shared, finished.stage);
      }
      stage += steps_at_once;
    }
    warpgroup_wait<0>();
    (warpgroup_fence_operand(products.accumulators), ...);
  }
};

}  // namespace jgg::sm90
