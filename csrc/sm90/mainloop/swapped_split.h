// The mainloop of float32 kernels for groups of few rows: what each warp and consumer does with one
// tile.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "sm90/mainloop/swapped_split_rows.h"
#include "sm90/mainloop/swapped_split_weights.h"
#include "sm90/swapped.h"
#include "sm90/wgmma.h"

namespace jgg::sm90 {

template <class Problem>
class SwappedSplitMainloop {
  using Config = typename Problem::Config;
  using Shared = SwappedSplitStorage<Config>;
  using Stage = StageIterator<Config::kStages>;
  using Params = typename Problem::Params;
  using Part = cutlass::bfloat16_t;

  template <int kRows>
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Part, Part, float,
                                 cute::Shape<cute::Int<kColumnsPerConsumer>, cute::Int<kRows>,
                                             cute::Int<Config::kTileK>>>()));
  template <int kRows>
  using Products = decltype(cute::partition_fragment_C(
      Mma<kRows>{}, cute::Shape<cute::Int<kColumnsPerConsumer>, cute::Int<kRows>>{}));

 public:
  // One thread's sums of a tile of at most kRows rows.
  template <int kRows>
  using Sums = float[kColumnsPerConsumer * kRows / kWarpgroup];

  __device__ static void load_weights(Params const& params, WorkTile const& work, Shared& shared,
                                      Stage& stage) {
    if (threadIdx.x % kWarpSize != 0) return;
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.weights_full[stage.stage];
      full.arrive_and_expect_tx(Config::kWeightBytes);
      Problem::load_rhs(params, work, k_tile, full, shared.weights[stage.stage]);
    }
  }

  __device__ static void bring_rows(Params const& params, WorkTile const& work, Shared& shared,
                                    Stage& stage) {
    RowLoader<Config> const rows(Problem::lhs_at(params, work), rows_of<Config>(work), params.k);
    // Load the next step while this one is stored, because a load takes longer than a step.
    auto next = rows.load(0);
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      auto const step = next;
      next = rows.load(k_tile + 1);
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      rows.store(step, shared.rows[stage.stage]);
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) shared.rows_full[stage.stage].arrive();
    }
  }

  // Adds the product of the tile, columns by rows, to the sums. The tensor cores truncate what they
  // add up. Each step therefore starts from zero, and its products are added by ordinary, rounded
  // additions.
  template <int kRows>
  __device__ static void multiply(WorkTile const& work, Shared& shared, Stage& stage, int consumer,
                                  Sums<kRows>& sums) {
    using namespace cute;
    auto const rows = row_descriptors<kRows>(shared);
    Products<kRows> products, corrections;
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.weights_full[stage.stage].wait(stage.phase);
      shared.rows_full[stage.stage].wait(stage.phase);
      warpgroup_fence_operand(products);
      warpgroup_fence_operand(corrections);
#pragma unroll
      for (int block = 0; block < Config::kTileK / kMmaK; ++block) {
        WeightParts<Config::kParts> const weights(
            read_weights<Config>(shared.weights[stage.stage], consumer, block));
        warpgroup_arrive();
        issue<kRows>(weights, rows, stage.stage, block, products, corrections);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(products);
      warpgroup_fence_operand(corrections);
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) shared.empty[stage.stage].arrive();
#pragma unroll
      for (int i = 0; i < size(products); ++i) sums[i] += corrected(products(i), corrections(i));
    }
  }

 private:
  // Returns the descriptors of the first part of rows in the first stage.
  template <int kRows>
  __device__ static auto row_descriptors(Shared& shared) {
    using namespace cute;
    using Layout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Part>{},
                                          Shape<Int<kRows>, Int<Config::kTileK>>{}));
    auto const tile =
        make_tensor(make_smem_ptr(reinterpret_cast<Part*>(shared.rows[0][0])), Layout{});
    auto const thread_mma = Mma<kRows>{}.get_slice(threadIdx.x % kWarpgroup);
    return in_uniform_registers(thread_mma.make_fragment_B(thread_mma.partition_B(tile)));
  }

  // Issues the products of all parts whose numbers add up to less than kParts, for 16 elements of
  // K.
  template <int kRows, class Rows>
  __device__ static void issue(WeightParts<Config::kParts> const& weights, Rows const& rows,
                               int stage, int block, Products<kRows>& products,
                               Products<kRows>& corrections) {
    using namespace cute;
    Mma<kRows> mma;
#pragma unroll
    for (int of_weights = 0; of_weights < Config::kParts; ++of_weights) {
      auto registers = make_tensor<Part>(Shape<Int<2 * 4>, Int<1>>{});
      auto words = recast<uint32_t>(registers);
#pragma unroll
      for (int i = 0; i < 4; ++i) words(i) = weights.part[of_weights][i];
#pragma unroll
      for (int of_rows = 0; of_weights + of_rows < Config::kParts; ++of_rows) {
        auto const descriptors =
            advance(rows, (stage * Config::kParts + of_rows) * Config::kPartBytes);
        bool const first = of_weights + of_rows == 0;
        bool const starts = block == 0 && of_weights == 0 && of_rows < 2;
        mma.accumulate_ = starts ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        gemm(mma, registers, descriptors(_, _, block), first ? products : corrections);
      }
    }
  }
};

}  // namespace jgg::sm90
