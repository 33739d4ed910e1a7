// Launches updates of float32 operands: splits the operands, then multiplies their parts.
#pragma once

#include "parts/listed.h"
#include "rank_k/launch.h"
#include "sm90/mainloop/parts.h"

namespace jgg::sm90 {

// Both products of a rank-2k update have the same two scales, of a and of b. As with 16-bit
// operands, steps may therefore alternate between the two products.
template <class Config>
struct RankKOfParts : parts::ListedParts<RankK<Config, 1>> {
  using Base = parts::ListedParts<RankK<Config, 1>>;
  using Params = typename Base::Params;

  static cudaError_t make_params(RankKArguments const& arguments, RankKStack const* stacks,
                                 int count, Params& params, int& units) {
    params.terms = parts::terms_of(arguments.accuracy);
    params.lhs_maxima = stacks->a_maxima;
    params.rhs_maxima = stacks->b ? stacks->b_maxima : stacks->a_maxima;
    return Base::make_params(arguments, stacks, count, params, units);
  }
};

template <ElementType>
cudaError_t rank_k_parts(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  RankKArguments parts;
  cudaError_t const status = split_operands(arguments, parts, stream);
  if (status != cudaSuccess) return status;
  return with_constants(
      [&](auto tile, auto transpose) {
        constexpr auto kMajor = major(Major::kK, transpose);
        using Problem =
            RankKOfParts<ConfigOf<decltype(tile), cutlass::half_t, float, kMajor, kMajor>>;
        return launch_rank_k<Problem, PartsMainloop<Problem>>(parts, stream);
      },
      OneTileOf<RankKPartsTiles>{config}, Flag{arguments.transpose});
}

}  // namespace jgg::sm90
