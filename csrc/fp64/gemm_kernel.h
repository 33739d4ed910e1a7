// The persistent kernel of lists of products: every thread copies, multiplies and stores.
#pragma once

#include "fp64/gemm_problem.h"
#include "fp64/loader.h"
#include "fp64/mainloop.h"

namespace jgg::fp64 {

// alpha * accumulators + beta * C. The tile goes through shared memory, so that a warp stores what
// is next to each other. As in BLAS, C is not read where beta is zero.
template <class Config>
__device__ void store_product(typename GemmList<Config>::Params const& params, int round,
                              Accumulators<Config>& accumulators, void* shared) {
  using Element = typename Config::Element;
  using Sum = Value<Element>;
  using Layout = StagedLayout<Config>;
  auto* const staged = static_cast<Sum*>(shared);
  accumulators.for_each_value(
      [&](int row, int column, Sum value) { staged[Layout::index(row, column)] = value; });
  __syncthreads();

  auto const tile = GemmList<Config>::tile(params, forgotten(round));
  auto const& problem = params.problems[tile.problem];
  Sum const alpha = widen(*problem.alpha);
  Sum const beta = params.adds_c ? widen(*problem.beta) : Sum{};
  bool const adds_c = !is_zero(beta);
  Element* const out = problem.out + int64_t(tile.m) * problem.n + tile.n;
  auto const is_stored = [&](int row, int column) {
    return row < problem.m - tile.m && column < problem.n - tile.n;
  };
  // All loads of a batch are under way before the first is used.
  constexpr int kElements = Config::kTile * Config::kTile / Config::kThreads, kBatch = 8;
#pragma unroll 1
  for (int batch = 0; batch < kElements; batch += kBatch) {
    Element c[kBatch] = {};
    if (adds_c) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        auto const [row, column] = place_of<Config>(batch + i);
        if (is_stored(row, column)) c[i] = out[int64_t(row) * problem.n + column];
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      auto const [row, column] = place_of<Config>(batch + i);
      if (!is_stored(row, column)) continue;
      Sum value = times(alpha, staged[Layout::index(row, column)]);
      if (adds_c) value = plus(value, times(beta, widen(c[i])));
      out[int64_t(row) * problem.n + column] = narrow<Element>(value);
    }
  }
  // The next tile's first step is behind a barrier of the mainloop.
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    gemm_kernel(const __grid_constant__ typename GemmList<Config>::Params params) {
  using Problem = GemmList<Config>;
  extern __shared__ __align__(128) uint8_t shared[];
  Loader<Config, Problem> loader(params, shared);
  Mainloop<Config> mainloop(shared);
  for (int round = 0;; ++round) {
    auto const tile = Problem::tile(params, round);
    if (tile.steps == 0) break;
    Accumulators<Config> accumulators;
    accumulators.clear();
    mainloop.multiply(accumulators, tile.steps, false, loader);
    store_product<Config>(params, round, accumulators, shared + Config::kStagedAt);
  }
}

}  // namespace jgg::fp64
