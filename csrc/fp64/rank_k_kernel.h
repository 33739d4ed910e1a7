// The persistent kernel of rank-k and rank-2k updates: every thread copies, multiplies and stores.
#pragma once

#include "fp64/loader.h"
#include "fp64/mainloop.h"
#include "fp64/rank_k_epilogue.h"
#include "fp64/rank_k_problem.h"

namespace jgg::fp64 {

// Returns the factor alpha / conj(alpha) of the first product of a Hermitian rank-2k update. The
// sum of both products is scaled by conj(alpha), so the first product is multiplied by this factor
// before the second product is added. The factor is 1 if the first product stays as it is.
template <class Problem>
__device__ Complex128 factor_of_first_product(typename Problem::Params const& params,
                                              typename Problem::Tile const& tile) {
  if (!params.hermitian) return {1.0, 0.0};
  Complex128 const alpha = params.stacks[tile.stack].alpha.at(tile.matrix);
  return alpha.im == 0.0 ? Complex128{1.0, 0.0} : over_conjugate(alpha);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    rank_k_kernel(const __grid_constant__ typename RankKProblem<Config>::Params params) {
  using Problem = RankKProblem<Config>;
  extern __shared__ __align__(128) uint8_t shared[];
  TileSlots<Config, Problem> const tiles(shared);
  Loader<Config, Problem> loader(params, shared);
  Mainloop<Config> mainloop(shared);
  for (int round = 0; tiles.at(round).steps > 0; ++round) {
    Accumulators<Config> accumulators;
    accumulators.clear();
    if constexpr (Config::kParts == 1) {
      mainloop.multiply(accumulators, tiles.at(round).steps, false, loader);
    } else {
      auto const tile = tiles.at(round);
      // The factor is kept in shared memory and computed before there are sums, because sums leave
      // no registers for its division.
      auto& factor = *reinterpret_cast<Complex128*>(shared + Config::kFactorAt);
      if (threadIdx.x == 0) factor = factor_of_first_product<Problem>(params, tile);
      int const products = Problem::products(params, tile);
#pragma unroll 1
      for (int product = 0; product < products; ++product) {
        if (product == 1 && !is_one(factor)) accumulators.scale(factor);
        mainloop.multiply(accumulators, tile.steps / products, params.hermitian, loader);
      }
    }
    RankKEpilogue<Config>(params, tiles.at(round), shared + Config::kStagedAt).store(accumulators);
  }
}

}  // namespace jgg::fp64
