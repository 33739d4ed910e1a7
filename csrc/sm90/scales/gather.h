// Loads rows of lhs that lie anywhere in memory (gather.h), and their scales, in FP8 kernels.
//
// Clusters share weights, as in kernels that do not gather, because a step waits for loads from L2,
// and sharing rows instead would load a quarter more. Each CTA therefore loads all 128 of its rows,
// which are more boxes than two warps can issue in time. Three warps load rows: the two that bring
// scales load 48 rows each, and the warp that loads weights loads 32.
#pragma once

#include "sm90/gather.h"
#include "sm90/mainloop/scaled_config.h"
#include "sm90/scales/wide.h"
#include "sm90/tma/load.h"

namespace jgg::sm90 {

template <class Storage>
struct GatheringStorage : Storage {
  alignas(16) int rows[2 * kScaleThreads];
};

// Warp i of the two warps that load scales also loads this many rows of a tile's second half, from
// row 64 + 32 i on. After the rows of each of these warps, the warp that loads weights loads the
// same number of rows.
constexpr int kRowsBesideScales = kWarpSize / 2;

// Loads kRows rows of a stage from row `first` on. One thread calls it.
template <class Problem, int kRows, class Shared, class Stage>
__device__ __forceinline__ void load_rows_of_stage(typename Problem::Params const& params,
                                                   Shared& shared, Stage const& at, int first,
                                                   int step) {
  constexpr int kBatch = 8;  // no registers are left for more
  load_rows<1, kRows, kBatch>(Problem::gathered(params),
                              cute::cast_smem_ptr_to_uint(&shared.rows[first]),
                              cute::cast_smem_ptr_to_uint(shared.full[at.stage].address()),
                              cute::cast_smem_ptr_to_uint(shared.lhs[at.stage]) + first * kRowBytes,
                              step * Problem::Config::kTileK);
}

// Returns whether a tile has rows in its second half. If not, these are not loaded.
template <class Problem>
__device__ bool has_both_halves(typename Problem::Params const& params, WorkTile const& work) {
  return Problem::rows_left(params, work) > kRowsPerConsumer;
}

// Loads the weights of a tile and some of its rows.
template <class Problem, class Shared, class Stage>
__device__ void load_weights_and_rows(typename Problem::Params const& params, WorkTile const& work,
                                      Shared& shared, Stage& stage, int rank) {
  using Config = typename Problem::Config;
  int const lane = threadIdx.x % kWarpSize, own = lane / kRowsBesideScales;
  int const first = kRowsPerConsumer + kRowsBesideScales;  // and from first + kWarpSize on
  if (work.k_tiles > 0) {
    int const row = first + own * kWarpSize + lane % kRowsBesideScales;
    shared.rows[row] = Problem::token_of(params, work, row);
  }
  __syncwarp();
  if (cute::elect_one_sync()) {
    bool const both = has_both_halves<Problem>(params, work);
    unsigned const bytes = Config::kRhsBytes + Config::kLhsBytes / (both ? 1 : 2);
    auto at = stage;
    for (int step = 0; step < work.k_tiles; ++step, ++at) {
      shared.empty[at.stage].wait(at.phase ^ 1);
      Barrier& full = shared.full[at.stage];
      full.arrive_and_expect_tx(bytes);
      BoxLoader<Config::kCluster> const loader(full.address(), rank);
      Problem::load_rhs(params, work, step, loader, shared.rhs[at.stage],
                        work.share == Share::kRhs);
      if (!both) continue;
      load_rows_of_stage<Problem, kRowsBesideScales>(params, shared, at, first, step);
      load_rows_of_stage<Problem, kRowsBesideScales>(params, shared, at, first + kWarpSize, step);
    }
  }
  stage += work.k_tiles;
}

// Loads the scales of a tile and the rest of its rows. Both warps that bring scales call it.
template <class Problem, class Shared, class Stage>
__device__ void bring_scales_and_rows(typename Problem::Params const& params, WorkTile const& work,
                                      Shared& shared, Stage& stage) {
  static_assert(GathersScaledRows<Problem>);
  using Config = typename Problem::Config;
  constexpr int kRows = 2, kSteps = WideScales<Config>::kSteps;
  static_assert(Config::kTileM == kRows * kScaleThreads && kRowsPerConsumer == kScaleThreads);
  if (work.k_tiles == 0) return;  // rows of no group, which have no scales of rhs
  int const thread = threadIdx.x % kScaleThreads;
  int row[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    row[i] = Problem::token_of(params, work, thread + i * kScaleThreads);
    bool const loads = i == 0 || thread % kWarpSize < kRowsBesideScales;
    if (loads) shared.rows[thread + i * kScaleThreads] = row[i];
  }
  __syncwarp();
  float const* const columns = Problem::own_rhs_scales(params, work);
  bool const both = has_both_halves<Problem>(params, work);
  int const first = thread / kWarpSize * kWarpSize;
  float4 scales[kRows];
#pragma unroll 1
  for (int step = 0; step < work.k_tiles; ++step, ++stage) {
    // Request scales from device memory before rows are loaded, and wait for the scales afterwards.
    if (step % kSteps == 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float const* const from = Problem::scales_of(params, row[i]);
        scales[i] = from ? __ldg(reinterpret_cast<float4 const*>(from + step)) : float4{};
      }
    }
    float const column = columns ? __ldg(columns + step * params.rhs_scales.block_stride) : 1.0f;
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    if (cute::elect_one_sync()) {
      load_rows_of_stage<Problem, kWarpSize>(params, shared, stage, first, step);
      if (both) {
        load_rows_of_stage<Problem, kRowsBesideScales>(params, shared, stage,
                                                       kRowsPerConsumer + first, step);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      shared.lhs_scales[stage.stage][thread + i * kScaleThreads] =
          of_step(scales[i], step % kSteps);
    }
    if (thread < Config::kRhsScales) shared.rhs_scales[stage.stage][thread] = column;
    shared.scales_full[stage.stage].arrive();
  }
}

}  // namespace jgg::sm90
