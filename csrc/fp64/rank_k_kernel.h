// The persistent kernel of rank-k and rank-2k updates: every thread copies, multiplies and stores.
#pragma once

#include "fp64/loader.h"
#include "fp64/mainloop.h"
#include "fp64/rank_k_epilogue.h"
#include "fp64/rank_k_problem.h"

namespace jgg::fp64 {

// The second product of a Hermitian rank-2k update is scaled by conj(alpha). So is the first one,
// if it is multiplied with alpha / conj(alpha) before the second is added to it. One, if that is
// nothing to do.
template <class Problem>
__device__ Complex128 factor_of_first_product(typename Problem::Params const& params,
                                              typename Problem::Tile const& tile) {
  if (!params.hermitian) return {1.0, 0.0};
  Complex128 const alpha = widen(params.stacks[tile.stack].alpha[tile.matrix]);
  return alpha.im == 0.0 ? Complex128{1.0, 0.0} : over_conjugate(alpha);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    rank_k_kernel(const __grid_constant__ typename RankKProblem<Config>::Params params) {
  using Problem = RankKProblem<Config>;
  extern __shared__ __align__(128) uint8_t shared[];
  Loader<Config, Problem> loader(params, shared);
  Mainloop<Config> mainloop(shared);
  auto& factor = *reinterpret_cast<Complex128*>(shared + Config::kFactorAt);
  for (int round = 0;; ++round) {
    auto const tile = Problem::tile(params, round);
    if (tile.steps == 0) break;
    int const products = Problem::products(params, tile);
    if constexpr (Config::kParts == 2) {
      // A division takes registers that there are not once there are sums.
      if (threadIdx.x == 0) factor = factor_of_first_product<Problem>(params, tile);
    }
    Accumulators<Config> accumulators;
    accumulators.clear();
#pragma unroll 1
    for (int product = 0; product < products; ++product) {
      if constexpr (Config::kParts == 2) {
        if (product == 1 && !is_one(factor)) accumulators.scale(factor);
      }
      mainloop.multiply(accumulators, products == 2 ? tile.steps / 2 : tile.steps, params.hermitian,
                        loader);
    }
    RankKEpilogue<Config>(params, round, shared + Config::kStagedAt).store(accumulators);
  }
}

}  // namespace jgg::fp64
