// The persistent kernel of rank-k and rank-2k updates: every thread copies, multiplies and stores.
#pragma once

#include "fp64/loader.h"
#include "fp64/mainloop.h"
#include "fp64/rank_k_epilogue.h"
#include "fp64/rank_k_problem.h"

namespace jgg::fp64 {

// The second product of a Hermitian rank-2k update is scaled by conj(alpha). So is the first one, if
// it is multiplied with alpha / conj(alpha) before the second is added to it.
template <class Problem, class Accumulators>
__device__ void scale_first_product(typename Problem::Params const& params, int round,
                                    Accumulators& accumulators) {
  if (!params.hermitian) return;
  auto const tile = Problem::tile(params, forgotten(round));
  auto const alpha = widen(params.stacks[tile.stack].alpha[tile.matrix]);
  if (!is_real(alpha)) accumulators.scale(over_conjugate(alpha));
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    rank_k_kernel(const __grid_constant__ typename RankKProblem<Config>::Params params) {
  using Problem = RankKProblem<Config>;
  extern __shared__ __align__(128) uint8_t shared[];
  Loader<Config, Problem> loader(params, shared);
  Mainloop<Config> mainloop(shared);
  for (int round = 0;; ++round) {
    auto const tile = Problem::tile(params, round);
    if (tile.steps == 0) break;
    int const products = Problem::products(params, tile);
    Accumulators<Config> accumulators;
    accumulators.clear();
#pragma unroll 1
    for (int product = 0; product < products; ++product) {
      if (product == 1) scale_first_product<Problem>(params, round, accumulators);
      mainloop.multiply(accumulators, tile.steps / products, params.hermitian, loader);
    }
    RankKEpilogue<Config>(params, round, shared + Config::kStages * Config::kStageBytes)
        .store(accumulators);
  }
}

}  // namespace jgg::fp64
