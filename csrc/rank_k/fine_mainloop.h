// The mainloop of symmetric updates in fine tiles: see scheduler/triangular_fine.h.
#pragma once

#include "sm90/mainloop.h"

namespace jgg::sm90 {

// 64 rows of what a stage holds: of its lhs, the rows at the work tile's `m`, or of its rhs, those
// at its `n`.
struct Strip {
  bool in_rhs;
  int index;

  __device__ int row(WorkTile const& work) const {
    return (in_rhs ? work.n : work.m) + index * kRowsPerConsumer;
  }
};

// What a consumer multiplies: a strip by the strips from another one on, as many as the
// accumulators have columns for.
template <class Accumulators_>
struct StripProduct {
  using Accumulators = Accumulators_;
  Strip lhs;
  Strip rhs;
  Accumulators& accumulators;
};

template <class Problem>
class FineMainloop : public Mainloop<Problem> {
  using Base = Mainloop<Problem>;
  using Config = typename Base::Config;
  using Element = typename Base::Element;
  using Shared = typename Base::Shared;
  using Stage = typename Base::Stage;
  using Params = typename Base::Params;
  static_assert(Problem::kBoxRows == Config::kTileN && Config::kCluster == 1);
  static_assert(Config::kStages % 2 == 0, "the steps of a pair are neighbours");

 public:
  __device__ static void load(Params const& params, WorkTile const& work, Shared& shared,
                              Stage& stage) {
    // The first steps wait for instructions too: there are few of them.
#pragma unroll 1
    for (int step = 0; step < work.k_tiles; ++step, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(Config::kLhsBytes + Config::kRhsBytes);
      BoxLoader<1> const loader(full.address(), 0);
      int const k = step * Config::kTileK;
      Problem::load_lhs(params, work, k, 0, loader,
                        reinterpret_cast<uint8_t*>(shared.lhs[stage.stage]), 0, false);
      Problem::load_rhs(params, work, k, 0, loader,
                        reinterpret_cast<uint8_t*>(shared.rhs[stage.stage]), 0, false);
    }
  }

  // Computes one or two products in the same steps.
  //
  // The steps of a rank-2k update are pairs: one has rows at `m` of A and rows at `n` of B, the
  // next one the others. So a strip of either finds strips of the other operand, but of the same
  // rows, in the step that it is paired with.
  template <class... Products>
  __device__ static void multiply(Params const& params, WorkTile const& work, Shared& shared,
                                  Stage& stage, Products... products) {
    using namespace cute;
    int const pair = params.two_products ? 1 : 0;
    Stage finished = stage;
    int released = 0;
    for (int step = 0; step < work.k_tiles; ++step) {
      shared.full[stage.stage].wait(stage.phase);
      shared.full[stage.stage ^ pair].wait(stage.phase);
      (warpgroup_fence_operand(products.accumulators), ...);
      warpgroup_arrive();
      (issue(shared, stage.stage, stage.stage ^ pair, step, products), ...);
      warpgroup_commit_batch();
      (warpgroup_fence_operand(products.accumulators), ...);

      // Of the two steps in flight the older one is done.
      warpgroup_wait<1>();
#pragma unroll 1
      for (; released < (step & ~pair); ++released, ++finished) {
        Base::release(shared, finished.stage);
      }
      ++stage;
    }
    warpgroup_wait<0>();
    (warpgroup_fence_operand(products.accumulators), ...);
#pragma unroll 1
    for (; released < work.k_tiles; ++released, ++finished) {
      Base::release(shared, finished.stage);
    }
  }

 private:
  template <class Product>
  __device__ static void issue(Shared& shared, int stage, int paired, int step,
                               Product const& product) {
    using namespace cute;
    using Accumulators = typename Product::Accumulators;
    constexpr int kColumns =
        decltype(size(std::declval<Accumulators&>()))::value * kWarpgroup / kRowsPerConsumer;
    typename Base::template Mma<kColumns> mma;
    bool const same = product.lhs.in_rhs == product.rhs.in_rhs;
    auto const lhs =
        make_tensor(make_smem_ptr(rows(shared, stage, product.lhs)),
                    typename Base::template SmemLayout<Config::kLhsMajor, kRowsPerConsumer>{});
    auto const rhs = make_tensor(make_smem_ptr(rows(shared, same ? paired : stage, product.rhs)),
                                 typename Base::template SmemLayout<Config::kRhsMajor, kColumns>{});
    auto const thread_mma = mma.get_slice(threadIdx.x % kWarpgroup);
    auto const lhs_fragment = thread_mma.make_fragment_A(thread_mma.partition_A(lhs));
    auto const rhs_fragment = thread_mma.make_fragment_B(thread_mma.partition_B(rhs));
#pragma unroll
    for (int k = 0; k < size<2>(lhs_fragment); ++k) {
      mma.accumulate_ = step == 0 && k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      gemm(mma, lhs_fragment(_, _, k), rhs_fragment(_, _, k), product.accumulators);
    }
  }

  __device__ static Element* rows(Shared& shared, int stage, Strip strip) {
    return (strip.in_rhs ? shared.rhs[stage] : shared.lhs[stage]) +
           strip.index * kRowsPerConsumer * Config::kTileK;
  }
};

}  // namespace jgg::sm90
