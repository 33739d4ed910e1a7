// The mainloop in which a consumer multiplies a slice while it promotes the one before.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "fp8/scaled_mainloop.h"

namespace jgg::fp8 {

// Slices take turns at two sets of products, so slices are narrow. WGMMA would read lhs from shared
// memory anew for each of them, as many bytes as of rhs and in all more than shared memory
// delivers: lhs goes to registers instead, once a step.
template <class Problem>
class OverlappedMainloop : public ScaledMainloop<Problem> {
  using Base = ScaledMainloop<Problem>;
  using Config = typename Base::Config;
  using Shared = typename Base::Shared;
  using Stage = typename Base::Stage;
  using Products = typename Base::Products;

  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<typename Config::Lhs, typename Config::Rhs, float,
                                 typename Base::SliceShape>()));

 public:
  template <class Sums, class Overlap>
  __device__ static void multiply(int k_tiles, Shared& shared, Stage& stage, int consumer,
                                  Turns<Config> const& turns, Sums& sums, Overlap&& overlap) {
    Products products[2];
    typename Base::StepScales scales;
    auto const rhs = Base::rhs_descriptors(shared);
    auto lhs = Mma{}
                   .get_slice(threadIdx.x % kWarpgroup)
                   .partition_fragment_A(Base::lhs_tile(shared, consumer));
    shared.full[stage.stage].wait(stage.phase);
    read_lhs(shared, stage.stage, consumer, lhs);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      Stage const now = stage;
      ++stage;
      turns.take();
      Base::template issue<Mma>(lhs, Base::rhs_of(rhs, now.stage, 0), products[0]);
#pragma unroll
      for (int slice = 0; slice < Config::kSlices; ++slice) {
        bool const last = slice == Config::kSlices - 1;
        bool const more = k_tile + 1 < k_tiles;
        // Before the next slice is issued: its products would leave too few registers.
        if (k_tile == 0) overlap(slice);
        if (!last) {
          Base::template issue<Mma>(lhs, Base::rhs_of(rhs, now.stage, slice + 1),
                                    products[(slice + 1) % 2]);
          if (slice + 1 == Config::kSlices / 2) turns.pass();
        }
        if (slice == 0) {
          shared.scales_full[now.stage].wait(now.phase);
          scales.read(shared, now.stage, consumer);
        }
        if (last && more) shared.full[stage.stage].wait(stage.phase);
        if (last) {
          cute::warpgroup_wait<0>();
        } else {
          cute::warpgroup_wait<1>();
        }
        cute::warpgroup_fence_operand(products[slice % 2]);
        if (last && !Config::kColumnScales) Base::release(shared, now.stage);
        // Arrives while the last slice is promoted.
        if (last && more) read_lhs(shared, stage.stage, consumer, lhs);
        Base::add(shared, now.stage, slice, scales, products[slice % 2], sums[slice]);
        if (last && Config::kColumnScales) Base::release(shared, now.stage);
      }
    }
  }

 private:
  // Four matrices of eight rows by 16 bytes make up the 16 rows by 32 elements that a warp gives
  // one WGMMA: the first eight rows and the others, of the left half and then of the right one.
  // Lane l gives the address of row l % 8 of matrix l / 8.
  template <class Fragment>
  __device__ static void read_lhs(Shared& shared, int stage, int consumer, Fragment& lhs) {
    auto words = cute::recast<uint32_t>(lhs);
    int const thread = threadIdx.x % kWarpgroup, lane = thread % kWarpSize;
    int const row = consumer * kRowsPerConsumer + thread / kWarpSize * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < cute::size<2>(lhs); ++k) {
      int const unit = (2 * k + lane / 16) ^ (row % 8);
      auto const& source = *reinterpret_cast<cute::uint128_t const*>(shared.lhs[stage] +
                                                                     row * kRowBytes + unit * 16);
      cute::SM75_U32x4_LDSM_N::copy(source, words[4 * k], words[4 * k + 1], words[4 * k + 2],
                                    words[4 * k + 3]);
    }
    cute::warpgroup_fence_operand(lhs);
  }
};

}  // namespace jgg::fp8
