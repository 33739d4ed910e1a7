// Launches products of lists of float32 operands: splits the operands, then multiplies their parts.
#pragma once

#include "grouped/launch.h"
#include "grouped/parts.h"
#include "parts/listed.h"
#include "sm90/mainloop/parts.h"

namespace jgg::sm90 {

template <class Config>
struct ProductsOfParts : parts::ListedParts<GroupedGemm<Config, kMaxListedProblems>> {
  using Base = parts::ListedParts<GroupedGemm<Config, kMaxListedProblems>>;
  using Params = typename Base::Params;

  static cudaError_t make_params(GroupedGemmArguments const& arguments, Params& params) {
    params.terms = parts::terms_of(arguments.accuracy);
    params.lhs_maxima = arguments.lhs_maxima;
    params.rhs_maxima = arguments.rhs_maxima;
    return Base::make_params(arguments, params);
  }
};

template <ElementType>
cudaError_t grouped_gemm_parts(TileConfig config, GroupedGemmArguments const& arguments,
                               cudaStream_t stream) {
  GroupedGemmArguments parts;
  cudaError_t const status = split_operands(arguments, parts, stream);
  if (status != cudaSuccess) return status;
  return with_constants(
      [&](auto tile, auto transpose_lhs, auto transpose_rhs) {
        using Config = ConfigOf<decltype(tile), cutlass::half_t, float,
                                major(Major::kK, transpose_lhs), major(Major::kMN, transpose_rhs)>;
        using Problem = ProductsOfParts<Config>;
        return launch_grouped_gemm<Problem, PartsMainloop<Problem>>(parts, stream);
      },
      OneTileOf<GroupedGemmTiles>{config}, Flag{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs});
}

}  // namespace jgg::sm90
