// The mainloop of FP8 products: a producer thread fills a ring of stages by TMA. The consumer
// warpgroups multiply each stage, scale its products and add them to float32 sums, or leave the
// additions to the tensor cores.
#pragma once

#include "sm90/mainloop/scaled_config.h"
#include "sm90/tma/load.h"
#include "sm90/wgmma.h"

namespace jgg::sm90 {

template <class Problem>
class ScaledMainloop {
 protected:
  using Config = typename Problem::Config;
  using Shared = ScaledStorage<Config>;
  using Stage = StageIterator<Config::kStages>;
  using Params = typename Problem::Params;

  template <class Element, int kRows>
  using SmemLayout =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kRows>, cute::Int<Config::kTileK>>{}));
  using SliceShape =
      cute::Shape<cute::Int<kRowsPerConsumer>, cute::Int<Config::kMmaN>, cute::Int<Config::kTileK>>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<typename Config::Lhs, typename Config::Rhs, float, SliceShape>()));
  using Products = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kRowsPerConsumer>, cute::Int<Config::kMmaN>>{}));
  static constexpr int kSums = kRowsPerConsumer * Config::kMmaN / kWarpgroup;

 public:
  // ---- producer ----

  __device__ static void load(Params const& params, WorkTile const& work, Shared& shared,
                              Stage& stage, int rank) {
    bool const share_lhs = work.share == Share::kLhs, share_rhs = work.share == Share::kRhs;
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(Config::kLhsBytes + Config::kRhsBytes);
      BoxLoader<Config::kCluster> const loader(full.address(), rank);
      Problem::load_lhs(params, work, k_tile, loader, shared.lhs[stage.stage], share_lhs);
      Problem::load_rhs(params, work, k_tile, loader, shared.rhs[stage.stage], share_rhs);
    }
  }

  // ---- consumer ----

  // Adds the tile's product to the sums. The two consumers share the tensor cores: while one scales
  // and adds, the other multiplies. `overlap(slice)` is called in the first step, while the
  // tensor cores are busy with that slice and before anything is added to it.
  template <class Sums, class Overlap>
  __device__ static void multiply(int k_tiles, Shared& shared, Stage& stage, int consumer,
                                  Sums& sums, Overlap&& overlap) {
    Products products;
    StepScales scales;
    auto const lhs = lhs_descriptors(shared, consumer);
    auto const rhs = rhs_descriptors(shared);
    shared.full[stage.stage].wait(stage.phase);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      Stage const now = stage;
      ++stage;
#pragma unroll
      for (int slice = 0; slice < Config::kSlices; ++slice) {
        bool const last = slice == Config::kSlices - 1;
        issue(lhs_of(lhs, now.stage), rhs_of(rhs, now.stage, slice), products);
        if (k_tile == 0) overlap(slice);
        if (Config::kStepScales && slice == 0) {
          // Scales do not come by TMA, and often come later than the stage.
          shared.scales_full[now.stage].wait(now.phase);
          scales.read(shared, now.stage, consumer);
        }
        // Wait for the next stage now, so that its first slice follows at once.
        if (last && k_tile + 1 < k_tiles) shared.full[stage.stage].wait(stage.phase);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(products);
        if (last && !Config::kColumnScales) release(shared, now.stage);
        add(shared, now.stage, slice, scales, products, sums[slice]);
        if (last && Config::kColumnScales) release(shared, now.stage);
      }
    }
  }

  // Multiplies without promotion: products of all K tiles add up in the tensor cores. The previous
  // tile is stored during the first K tile. This K tile is therefore multiplied in registers of its
  // own, a slice at a time.
  template <class Sums, class Overlap>
  __device__ static void accumulate(int k_tiles, Shared& shared, Stage& stage, int consumer,
                                    Sums& sums, Overlap&& overlap) {
    auto const first_lhs = lhs_descriptors(shared, consumer);
    auto const first_rhs = rhs_descriptors(shared);
    {
      Products products;
      shared.full[stage.stage].wait(stage.phase);
#pragma unroll
      for (int slice = 0; slice < Config::kSlices; ++slice) {
        issue(lhs_of(first_lhs, stage.stage), rhs_of(first_rhs, stage.stage, slice), products);
        overlap(slice);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(products);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[slice][i] = products(i);
      }
      release(shared, stage.stage);
      ++stage;
    }
    Stage finished = stage;
    for (int k_tile = 1; k_tile < k_tiles; ++k_tile, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
      accumulate_step(lhs_of(first_lhs, stage.stage), first_rhs, stage.stage, sums);
      // The older of the two K tiles in flight is done with its stage.
      cute::warpgroup_wait<1>();
      if (k_tile > 1) {
        release(shared, finished.stage);
        ++finished;
      }
    }
    cute::warpgroup_wait<0>();
    if (k_tiles > 1) release(shared, finished.stage);
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) fence(sums[slice]);
  }

  // Passes over the stages of a tile in which this consumer has no rows.
  __device__ static void skip(WorkTile const& work, Shared& shared, Stage& stage) {
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
      if constexpr (Config::kStepScales) shared.scales_full[stage.stage].wait(stage.phase);
      release(shared, stage.stage);
    }
  }

  // How many arrivals free a stage: each consumer warp of each CTA, because a multicast fills the
  // stage of the whole cluster.
  static constexpr int kEmptyArrivals = kConsumers * kWarpgroup / kWarpSize * Config::kCluster;

 protected:
  // A thread's scales of one step: the scales of its two rows, times the scales of the blocks of
  // columns.
  struct StepScales {
    static constexpr int kColumns = Config::kColumnScales ? 1 : Config::kRhsScales;
    float row[kColumns][2];

    __device__ void read(Shared const& shared, int stage, int consumer) {
      int const thread = threadIdx.x % kWarpgroup;
      float const* rows = shared.lhs_scales[stage] + consumer * kRowsPerConsumer +
                          thread / kWarpSize * 16 + thread % kWarpSize / 4;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        float const column = Config::kColumnScales ? 1.0f : shared.rhs_scales[stage][i];
        row[i][0] = rows[0] * column;
        row[i][1] = rows[8] * column;
      }
    }
  };

  // Returns a consumer's rows of the first stage.
  __device__ static auto lhs_tile(Shared& shared, int consumer) {
    return cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<typename Config::Lhs*>(
                                 shared.lhs[0] + consumer * kRowsPerConsumer * kRowBytes)),
                             SmemLayout<typename Config::Lhs, kRowsPerConsumer>{});
  }

  // Returns the descriptors of the rows of lhs_tile().
  __device__ static auto lhs_descriptors(Shared& shared, int consumer) {
    auto const thread_mma = Mma{}.get_slice(threadIdx.x % kWarpgroup);
    return in_uniform_registers(
        thread_mma.make_fragment_A(thread_mma.partition_A(lhs_tile(shared, consumer))));
  }

  // Returns the descriptors of the first slice of rhs in the first stage.
  __device__ static auto rhs_descriptors(Shared& shared) {
    using namespace cute;
    auto const thread_mma = Mma{}.get_slice(threadIdx.x % kWarpgroup);
    auto const tile =
        make_tensor(make_smem_ptr(reinterpret_cast<typename Config::Rhs*>(shared.rhs[0])),
                    SmemLayout<typename Config::Rhs, Config::kMmaN>{});
    return in_uniform_registers(thread_mma.make_fragment_B(thread_mma.partition_B(tile)));
  }

  // Return the descriptors of any stage and slice.
  template <class Descriptors>
  __device__ static auto lhs_of(Descriptors const& first, int stage) {
    return advance(first, stage * Config::kLhsBytes);
  }
  template <class Descriptors>
  __device__ static auto rhs_of(Descriptors const& first, int stage, int slice) {
    return advance(first, stage * Config::kRhsBytes + slice * Config::kMmaN * kRowBytes);
  }

  // Issues the products of a slice of 64 rows by kMmaN columns.
  template <class Lhs, class Rhs>
  __device__ static void issue(Lhs const& lhs, Rhs const& rhs, Products& products) {
    Mma mma;
    issue_batch(mma, lhs, rhs, true, products);
  }

  // Issues the products of all slices of a step. The tensor cores add them to the sums.
  template <class Lhs, class Rhs, class Sums>
  __device__ static void accumulate_step(Lhs const& lhs, Rhs const& first_rhs, int stage,
                                         Sums& sums) {
    Mma mma;
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) fence(sums[slice]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      auto accumulators =
          cute::make_tensor(cute::make_rmem_ptr(&sums[slice][0]), typename Products::layout_type{});
      issue_step(mma, lhs, rhs_of(first_rhs, stage, slice), false, accumulators);
    }
    cute::warpgroup_commit_batch();
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) fence(sums[slice]);
  }

  __device__ static void fence(float (&sums)[kSums]) {
#pragma unroll
    for (float& sum : sums) cute::warpgroup_fence_operand(sum);
  }

  // Scales the products of a slice and adds them to its sums. Element i of a thread's products is
  // in row i / 2 % 2 of the thread's two rows, and in the eight columns from i / 4 * 8 on.
  __device__ static void add(Shared& shared, int stage, int slice, StepScales const& scales,
                             Products const& products, float (&sums)[kSums]) {
    if constexpr (!Config::kStepScales) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += products(i);
    } else if constexpr (Config::kColumnScales) {
      float const* columns = shared.rhs_scales[stage] + slice * Config::kMmaN + threadIdx.x % 4 * 2;
      // Multiply by the row's scale first, so that all multiplications of a row find it in the
      // reuse cache. Then multiply both rows of a column by the column's scale. This reads 5 %
      // fewer registers than multiplying by the product of the two scales.
      float const low = scales.row[0][0], high = scales.row[0][1];
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        float2 const scale = *reinterpret_cast<float2 const*>(columns + i * 2);
        sums[i] += scale.x * (low * products(i));
        sums[i + 2] += scale.x * (high * products(i + 2));
        sums[i + 1] += scale.y * (low * products(i + 1));
        sums[i + 3] += scale.y * (high * products(i + 3));
      }
    } else {
      // Add row after row, so that every other FFMA finds its scale in the reuse cache. Additions
      // wait for reads of registers, because WGMMA reads registers at the same time.
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int j = 0; j < kSums / 2; ++j) {
          int const i = j / 2 * 4 + row * 2 + j % 2;
          int const column = (slice * Config::kMmaN + i * 2) / Config::kScaleColumns;
          sums[i] += scales.row[column][row] * products(i);
        }
      }
    }
  }

  // Releases a stage for one warp. Each warp does this for itself, because it reads scales that no
  // other warp reads.
  __device__ static void release(Shared& shared, int stage) {
    int const lane = threadIdx.x % kWarpSize;
    __syncwarp();
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) shared.empty[stage].arrive();
    } else {
      shared.empty[stage].arrive(lane, lane < Config::kCluster);
    }
  }
};

}  // namespace jgg::sm90
