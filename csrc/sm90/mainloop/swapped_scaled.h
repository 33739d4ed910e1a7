// The mainloop of swapped FP8 kernels: what each warp and consumer does with one tile.
#pragma once

#include "sm90/epilogue/swapped.h"
#include "sm90/swapped.h"
#include "sm90/tma/load.h"
#include "sm90/wgmma.h"

namespace jgg::sm90 {

template <class Problem>
class SwappedScaledMainloop {
  using Config = typename Problem::Config;
  using Shared = SwappedScaledStorage<Config>;
  using Stage = StageIterator<Config::kStages>;
  using Params = typename Problem::Params;

  template <class Element, int kRows>
  using SmemLayout =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kRows>, cute::Int<Config::kTileK>>{}));
  template <int kRows>
  using TileShape =
      cute::Shape<cute::Int<kColumnsPerConsumer>, cute::Int<kRows>, cute::Int<Config::kTileK>>;
  template <int kRows>
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<typename Config::Rhs, typename Config::Lhs, float,
                                 TileShape<kRows>>()));
  template <int kRows>
  using Products = decltype(cute::partition_fragment_C(
      Mma<kRows>{}, cute::Shape<cute::Int<kColumnsPerConsumer>, cute::Int<kRows>>{}));
  // One thread's sums of a tile of at most kRows rows.
  template <int kRows>
  using Sums = float[kColumnsPerConsumer * kRows / kWarpgroup];

 public:
  __device__ static void load(Params const& params, WorkTile const& work, Shared& shared,
                              Stage& stage, int) {
    int const rows = kBringsRows<Problem> ? 0 : rows_of<Config>(work);
    int const boxes = (rows + Config::kBoxRows - 1) / Config::kBoxRows;
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(Config::kRhsBytes + boxes * Config::kBoxBytes);
      BoxLoader<1> const loader(full.address(), 0);
      Problem::load_rhs(params, work, k_tile, loader, shared.rhs[stage.stage], false);
      if constexpr (!kBringsRows<Problem>) {
        for (int box = 0; box < boxes; ++box) {
          Problem::load_lhs(params, work, k_tile, box * Config::kBoxRows, loader,
                            shared.lhs[stage.stage] + box * Config::kBoxBytes);
        }
      }
    }
  }

  // Every warp of the consumers reads scales.
  static constexpr int kEmptyArrivals = kConsumers * kWarpgroup / kWarpSize;

  // Multiplies and stores a tile of at most kRows rows. Boxes and rows that were not loaded hold
  // old data, which only reaches rows of the result that are not stored.
  template <int kRows>
  __device__ static void compute(Params const& params, WorkTile const& work, Shared& shared,
                                 Stage& stage, int consumer,
                                 SwappedEpilogue<Config> const& epilogue) {
    Sums<kRows> sums = {};
    multiply<kRows>(work.k_tiles, shared, stage, consumer, sums);
    int const first = consumer * kColumnsPerConsumer;
    epilogue.template store<kRows>(
        sums, Problem::store_at(params, work, 0), rows_of<Config>(work),
        [&](int column) { return Problem::channel_scale(params, work, first + column); });
  }

 private:
  // Adds the tile's product to the sums: columns of rhs by rows of lhs.
  template <int kRows>
  __device__ static void multiply(int k_tiles, Shared& shared, Stage& stage, int consumer,
                                  Sums<kRows>& sums) {
    auto const thread_mma = Mma<kRows>{}.get_slice(threadIdx.x % kWarpgroup);
    auto const rhs = thread_mma.make_fragment_A(
        thread_mma.partition_A(tile<typename Config::Rhs, kColumnsPerConsumer>(shared.rhs[0])));
    auto const lhs = thread_mma.make_fragment_B(
        thread_mma.partition_B(tile<typename Config::Lhs, kRows>(shared.lhs[0])));
    int const column = consumer * kColumnsPerConsumer;
    Products<kRows> products;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
      if constexpr (kBringsRows<Problem>) shared.scales_full[stage.stage].wait(stage.phase);
      issue<kRows>(advance(rhs, stage.stage * Config::kRhsBytes + column * kRowBytes),
                   advance(lhs, stage.stage * Config::kLhsBytes), products);
      // Scales that come without their rows often come later than the stage.
      if constexpr (!kBringsRows<Problem>) shared.scales_full[stage.stage].wait(stage.phase);
      float const column_scale = shared.rhs_scales[stage.stage][column / Config::kScaleColumns];
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(products);
      add(shared.lhs_scales[stage.stage], column_scale, products, sums);
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) shared.empty[stage.stage].arrive();
    }
  }

  template <class Element, int kRows>
  __device__ static auto tile(uint8_t* data) {
    return cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Element*>(data)),
                             SmemLayout<Element, kRows>{});
  }

  // Issues the products of a consumer's columns of rhs with all rows of lhs.
  template <int kRows, class Rhs, class Lhs>
  __device__ static void issue(Rhs const& rhs, Lhs const& lhs, Products<kRows>& products) {
    Mma<kRows> mma;
    issue_batch(mma, rhs, lhs, true, products);
  }

  // Scales the products and adds them to the sums. Element i of a thread's products is in row i / 4
  // * 8 + thread % 4 * 2 + i % 2 of the tile.
  template <class Products, int kSums>
  __device__ static void add(float const* row_scales, float column_scale, Products const& products,
                             float (&sums)[kSums]) {
    auto const* const two_rows = reinterpret_cast<float2 const*>(row_scales) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      float2 const scales = two_rows[i];
      float const even = scales.x * column_scale, odd = scales.y * column_scale;
      sums[i] += even * products(i);
      sums[i + 1] += odd * products(i + 1);
      sums[i + 2] += even * products(i + 2);
      sums[i + 3] += odd * products(i + 3);
    }
  }
};

}  // namespace jgg::sm90
