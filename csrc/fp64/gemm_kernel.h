// The persistent kernel of lists of products: every thread copies, multiplies and stores.
#pragma once

#include "fp64/direct_store.h"
#include "fp64/gemm_problem.h"
#include "fp64/loader.h"
#include "fp64/mainloop.h"

namespace jgg::fp64 {

// Stores alpha * accumulators + beta * C. As in BLAS, C is not read if beta is zero. If C is read,
// the tile goes through shared memory, so that a warp reads and writes contiguous elements.
template <class Config>
__device__ void store_product(typename GemmList<Config>::Params const& params,
                              ProductTile const& tile, Accumulators<Config>& accumulators,
                              void* shared) {
  using Element = typename Config::Element;
  using Sum = Value<Element>;
  using Layout = StagedLayout<Config>;
  auto const& problem = params.problems[tile.problem];
  Sum const alpha = widen(*problem.alpha);
  Sum const beta = params.adds_c ? widen(*problem.beta) : Sum{};
  Element* const out = problem.out + int64_t(tile.m) * problem.n + tile.n;
  int const rows = problem.m - tile.m, columns = problem.n - tile.n, pitch = problem.n;
  if (is_zero(beta)) {
    store_directly(accumulators, alpha, out, rows, columns, pitch);
    return;
  }

  auto* const staged = static_cast<Sum*>(shared);
  accumulators.for_each_value(
      [&](int row, int column, Sum value) { staged[Layout::index(row, column)] = value; });
  __syncthreads();
  // All accesses of a batch are in flight together. If elements were accessed one by one, the sum
  // of the latencies would be a quarter of the time of a product with k = 1024.
  constexpr int kElements = Config::kTile * Config::kTile / Config::kThreads, kBatch = 8;
#pragma unroll 1
  for (int batch = 0; batch < kElements; batch += kBatch) {
    bool stored[kBatch];
    Element c[kBatch] = {};
    Sum values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      auto const [row, column] = place_of<Config>(batch + i);
      stored[i] = row < rows && column < columns;
      if (stored[i]) c[i] = out[int64_t(row) * pitch + column];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      auto const [row, column] = place_of<Config>(batch + i);
      Sum const product = times(alpha, staged[Layout::index(row, column)]);
      values[i] = plus(product, times(beta, widen(c[i])));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      auto const [row, column] = place_of<Config>(batch + i);
      if (stored[i]) out[int64_t(row) * pitch + column] = narrow<Element>(values[i]);
    }
  }
  // No barrier is needed here, because the mainloop has one before the next tile is staged.
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    gemm_kernel(const __grid_constant__ typename GemmList<Config>::Params params) {
  using Problem = GemmList<Config>;
  extern __shared__ __align__(128) uint8_t shared[];
  TileSlots<Config, Problem> const tiles(shared);
  Loader<Config, Problem> loader(params, shared);
  Mainloop<Config> mainloop(shared);
  for (int round = 0;; ++round) {
    int const steps = tiles.at(round).steps;
    if (steps == 0) break;
    Accumulators<Config> accumulators;
    accumulators.clear();
    mainloop.multiply(accumulators, steps, false, loader);
    store_product<Config>(params, tiles.at(round), accumulators, shared + Config::kStagedAt);
  }
}

}  // namespace jgg::fp64
