// The mainloop of consumers that take turns: one of them multiplies all rows of a tile.
#pragma once

#include "sm90/mainloop/cooperative.h"
#include "sm90/wgmma.h"

namespace jgg::sm90 {

template <class Problem>
class PingpongMainloop : public CooperativeMainloop<Problem> {
  using Base = CooperativeMainloop<Problem>;
  using Config = typename Base::Config;
  using Shared = typename Base::Shared;
  using Stage = typename Base::Stage;
  using Mma = typename Base::template Mma<Config::kTileN>;

  static constexpr int kMmaK = 16;  // K of one WGMMA instruction

 public:
  using Accumulators = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>>{}));

  // Sets accumulators to the tile's product. `pass_on` is called once the last WGMMA of the product
  // is issued.
  template <class PassOn>
  __device__ static void multiply(WorkTile const& work, Shared& shared, Stage& stage,
                                  Accumulators& accumulators, PassOn&& pass_on) {
    using namespace cute;
    Mma mma;
    auto const first_lhs = lhs_descriptors(mma, shared);
    auto const first_rhs = rhs_descriptors(mma, shared);
    Stage finished = stage;
    int const whole = work.extent / Config::kTileK;
    for (int k_tile = 0; k_tile < whole; ++k_tile) {
      shared.full[stage.stage].wait(stage.phase);
      auto const lhs = advance(first_lhs, stage.stage * Config::kLhsBytes);
      auto const rhs = advance(first_rhs, stage.stage * Config::kRhsBytes);
      issue_batch(mma, lhs, rhs, k_tile == 0, accumulators);
      if (k_tile + 1 == work.k_tiles) pass_on();
      // The older of the two K tiles in flight is done with its stage.
      warpgroup_wait<1>();
      if (k_tile > 0) {
        Base::release(shared, finished.stage);
        ++finished;
      }
      ++stage;
    }
    // For a last K tile that is not full, issue only the instructions that have rows. Each is a
    // batch of its own, because the compiler would serialise batches of variable length.
    if (whole < work.k_tiles) {
      int const products = (work.extent % Config::kTileK + kMmaK - 1) / kMmaK;
      shared.full[stage.stage].wait(stage.phase);
      auto const lhs = advance(first_lhs, stage.stage * Config::kLhsBytes);
      auto const rhs = advance(first_rhs, stage.stage * Config::kRhsBytes);
#pragma unroll 1
      for (int k = 0; k < products; ++k) {
        warpgroup_fence_operand(accumulators);
        warpgroup_arrive();
        mma.accumulate_ = whole == 0 && k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        gemm(mma, lhs(_, _, k), rhs(_, _, k), accumulators);
        warpgroup_commit_batch();
        warpgroup_fence_operand(accumulators);
        if (k + 1 == products) pass_on();
        warpgroup_wait<1>();
        if (k == 0 && whole > 0) Base::release(shared, finished.stage);
      }
      finished = stage;
      ++stage;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulators);
    Base::release(shared, finished.stage);
  }

  // How many arrivals free a stage: the consumer whose tile it is, of each CTA.
  static constexpr int kEmptyArrivals = Config::kCluster;

 private:
  // Returns the descriptors of a tile's rows in the first stage.
  __device__ static auto lhs_descriptors(Mma const& mma, Shared& shared) {
    auto const thread_mma = mma.get_slice(threadIdx.x % kWarpgroup);
    auto const tile =
        cute::make_tensor(cute::make_smem_ptr(shared.lhs[0]),
                          typename Base::template SmemLayout<Config::kLhsMajor, Config::kTileM>{});
    return in_uniform_registers(thread_mma.make_fragment_A(thread_mma.partition_A(tile)));
  }

  // Returns the descriptors of a tile's columns in the first stage.
  __device__ static auto rhs_descriptors(Mma const& mma, Shared& shared) {
    auto const thread_mma = mma.get_slice(threadIdx.x % kWarpgroup);
    auto const tile = cute::make_tensor(cute::make_smem_ptr(shared.rhs[0]),
                                        typename Base::template RhsLayout<Config::kTileN>{});
    return in_uniform_registers(thread_mma.make_fragment_B(thread_mma.partition_B(tile)));
  }
};

}  // namespace jgg::sm90
