// The mainloop of consumers that share a tile: a producer thread fills a ring of stages by TMA, and
// the consumer warpgroups multiply the stages with WGMMA.
#pragma once

#include <cute/tensor.hpp>

#include "scheduler/warp.h"
#include "sm90/concepts.h"
#include "sm90/config.h"
#include "sm90/gather.h"
#include "sm90/tma/load.h"
#include "sm90/wgmma.h"

namespace jgg::sm90 {

// The first `kEarlyReleaseSteps` steps of a tile release their stages early (sm90/config.h).
template <class Problem, int kEarlyReleaseSteps = Problem::kEarlyReleaseSteps>
class CooperativeMainloop {
 protected:
  using Config = typename Problem::Config;
  using Element = typename Config::Element;
  using Shared = SharedStorage<Config>;
  using Stage = StageIterator<Config::kStages>;
  using Params = typename Problem::Params;

  template <Major kMajor>
  using SmemAtom = std::conditional_t<kMajor == Major::kK, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                      cute::GMMA::Layout_MN_SW128_Atom<Element>>;
  // A box of an MN-major operand is 64 wide and kTileK deep, so boxes are walked along K first.
  template <Major kMajor>
  using BoxOrder = std::conditional_t<kMajor == Major::kK, cute::Step<cute::_1, cute::_2>,
                                      cute::Step<cute::_2, cute::_1>>;
  template <Major kMajor, int kRows>
  using SmemLayout = decltype(cute::tile_to_shape(
      SmemAtom<kMajor>{}, cute::Shape<cute::Int<kRows>, cute::Int<Config::kTileK>>{},
      BoxOrder<kMajor>{}));
  // Boxes of rhs that split K follow one another along K.
  template <int kColumns>
  using RhsLayout = decltype(cute::tile_to_shape(
      cute::tile_to_shape(SmemAtom<Config::kRhsMajor>{},
                          cute::Shape<cute::Int<kColumns>, cute::Int<Config::kRhsBoxDepth>>{},
                          BoxOrder<Config::kRhsMajor>{}),
      cute::Shape<cute::Int<kColumns>, cute::Int<Config::kTileK>>{}));

  template <int kColumns>
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kRowsPerConsumer>, cute::Int<kColumns>, cute::Int<Config::kTileK>>,
          gmma_major(Config::kLhsMajor), gmma_major(Config::kRhsMajor)>()));

 public:
  // Accumulators of a tile's first columns.
  template <int kColumns>
  using FirstColumns = decltype(cute::partition_fragment_C(
      Mma<kColumns>{}, cute::Shape<cute::Int<kRowsPerConsumer>, cute::Int<kColumns>>{}));
  using Accumulators = FirstColumns<Config::kTileN>;

  // ---- producer ----

  __device__ static void load(Params const& params, WorkTile const& work, Shared& shared,
                              Stage& stage, int rank) {
    load(params, work, shared, stage, rank, [](int, Stage const&) {});
  }

  // `load_more(step, stage)` is called after the boxes of a step are issued.
  template <class LoadMore>
  __device__ static void load(Params const& params, WorkTile const& work, Shared& shared,
                              Stage& stage, int rank, LoadMore const& load_more) {
    // The lower half of a tile may lie past its group. The rows of this half are then neither
    // loaded nor multiplied. Columns past the last column of the result are not loaded either,
    // because zero-fill by TMA is slower than a load, and the products of these columns are never
    // stored.
    int const lhs_boxes = Problem::rows_left(params, work) > kRowsPerConsumer ? 2 : 1;
    int const columns = Problem::columns_needed(params, work);
    int const box_columns = rhs_box_columns(params);
    int const rhs_boxes = Config::kRhsBoxesSplitK ? 2 : (columns > 0) + (columns > box_columns);
    int const rhs_box_bytes = Config::kRhsBoxBytes / Config::kRhsBoxColumns * box_columns;
    unsigned const bytes = lhs_boxes * Config::kLhsBoxBytes + rhs_boxes * rhs_box_bytes;
    bool const share_lhs = work.share == Share::kLhs, share_rhs = work.share == Share::kRhs;

    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(bytes);
      BoxLoader<Config::kCluster> const loader(full.address(), rank);
      auto* lhs = reinterpret_cast<uint8_t*>(shared.lhs[stage.stage]);
      auto* rhs = reinterpret_cast<uint8_t*>(shared.rhs[stage.stage]);
#pragma unroll
      for (int box = 0; box < Config::kBoxes; ++box) {
        if (!kGathersLhs<Problem> && box < lhs_boxes) {
          Problem::load_lhs(params, work, k_tile * Config::kTileK, box * kRowsPerConsumer, loader,
                            lhs + box * Config::kLhsBoxBytes, box, share_lhs);
        }
      }
#pragma unroll
      for (int box = 0; box < Config::kBoxes; ++box) {
        if (box < rhs_boxes) {
          int const k = Config::kRhsBoxesSplitK ? box * Config::kRhsBoxDepth : 0;
          int const column = Config::kRhsBoxesSplitK ? 0 : box * box_columns;
          Problem::load_rhs(params, work, k_tile * Config::kTileK + k, column, loader,
                            rhs + box * rhs_box_bytes, box, share_rhs);
        }
      }
      load_more(k_tile, stage);
    }
  }

  // Returns the columns of a box of rhs. If the result has few columns, a problem with
  // kHasSmallBoxes has narrower boxes.
  __device__ static int rhs_box_columns(Params const& params) {
    if constexpr (kHasSmallBoxes<Problem>) {
      return params.rhs_box_columns;
    } else {
      return Config::kRhsBoxColumns;
    }
  }

  // ---- consumer ----

  // Sets accumulators to the product of this consumer's rows with the tile's columns, or with the
  // tile's first columns. `overlap(step)` is called once a step while the tensor cores are busy
  // with it.
  template <class Accumulators, class Overlap>
  __device__ static void multiply(Params const& params, WorkTile const& work, Shared& shared,
                                  Stage& stage, int consumer, Accumulators& accumulators,
                                  Overlap&& overlap) {
    using namespace cute;
    constexpr int kColumns = kColumnsOf<Accumulators>;
    Mma<kColumns> mma;
    auto const first_lhs = lhs_descriptors(mma, shared, consumer);
    auto const first_rhs = rhs_descriptors<kColumns>(mma, shared);
    int k_tile = 0;
    auto const issue = [&] {
      shared.full[stage.stage].wait(stage.phase);
      auto const lhs = advance(first_lhs, stage.stage * Config::kLhsBytes);
      auto const rhs = advance(first_rhs, stage.stage * Config::kRhsBytes);
      issue_batch(mma, lhs, rhs, k_tile == 0, accumulators);
      overlap(k_tile);
    };

    int const early = min(work.k_tiles, early_steps(params));
    if constexpr (kEarlyReleaseSteps != kNoSteps) {
      for (; k_tile < early; ++k_tile, ++stage) {
        issue();
        warpgroup_wait<0>();
        release(shared, stage.stage);
      }
    }
    if constexpr (kEarlyReleaseSteps != kAllSteps) {
      Stage finished = stage;
      for (; k_tile < work.k_tiles; ++k_tile, ++stage) {
        issue();
        // The older of the two K tiles in flight is done with its stage.
        warpgroup_wait<1>();
        if (k_tile > early) {
          release(shared, finished.stage);
          ++finished;
        }
      }
      warpgroup_wait<0>();
      if (early < work.k_tiles) release(shared, finished.stage);
    }
    warpgroup_fence_operand(accumulators);
  }

  // Passes over the stages of a tile in which this consumer has no rows.
  __device__ static void skip(WorkTile const& work, Shared& shared, Stage& stage) {
    for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
      release(shared, stage.stage);
    }
  }

  // How many arrivals free a stage: each consumer of each CTA, because a multicast fills the stage
  // of the whole cluster.
  static constexpr int kEmptyArrivals = kConsumers * Config::kCluster;

  // Releases a stage for this consumer.
  __device__ static void release(Shared& shared, int stage) {
    int const thread = threadIdx.x % kWarpgroup;
    if constexpr (Config::kCluster == 1) {
      if (thread == 0) shared.empty[stage].arrive();
    } else {
      // A different warp arrives at the barrier of each CTA.
      shared.empty[stage].arrive(thread / kWarpSize,
                                 thread % kWarpSize == 0 && thread / kWarpSize < Config::kCluster);
    }
  }

 protected:
  __device__ static int early_steps(Params const& params) {
    if constexpr (kEarlyReleaseSteps == kStepsOfParams) {
      return params.early_steps;
    } else {
      return kEarlyReleaseSteps;
    }
  }

  // Returns the descriptors of a consumer's rows in the first stage.
  template <class TiledMma>
  __device__ static auto lhs_descriptors(TiledMma const& mma, Shared& shared, int consumer) {
    auto const tile = cute::make_tensor(
        cute::make_smem_ptr(shared.lhs[0] + consumer * kRowsPerConsumer * Config::kTileK),
        SmemLayout<Config::kLhsMajor, kRowsPerConsumer>{});
    auto const thread_mma = mma.get_slice(threadIdx.x % kWarpgroup);
    return in_uniform_registers(thread_mma.make_fragment_A(thread_mma.partition_A(tile)));
  }

  // Returns the descriptors of the tile's first kColumns columns in the first stage.
  template <int kColumns, class TiledMma>
  __device__ static auto rhs_descriptors(TiledMma const& mma, Shared& shared) {
    auto const tile = cute::make_tensor(cute::make_smem_ptr(shared.rhs[0]), RhsLayout<kColumns>{});
    auto const thread_mma = mma.get_slice(threadIdx.x % kWarpgroup);
    return in_uniform_registers(thread_mma.make_fragment_B(thread_mma.partition_B(tile)));
  }
};

}  // namespace jgg::sm90
