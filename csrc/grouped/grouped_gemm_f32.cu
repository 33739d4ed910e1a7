#include <cutlass/numeric_types.h>

#include "grouped/launch.h"
#include "grouped/parts.h"
#include "sm90/f32/list_segments.h"
#include "sm90/f32/mainloop.h"

namespace jgg::sm90 {
namespace {

template <class Config>
struct ProductsOfParts : f32::ListSegments<GroupedGemm<Config, kMaxListedProblems>> {
  using Base = f32::ListSegments<GroupedGemm<Config, kMaxListedProblems>>;
  using Params = typename Base::Params;

  static cudaError_t make_params(GroupedGemmArguments const& arguments, Params& params) {
    params.terms = f32::terms_of(arguments.accuracy);
    params.lhs_maxima = arguments.lhs_maxima;
    params.rhs_maxima = arguments.rhs_maxima;
    return Base::make_params(arguments, params);
  }
};

}  // namespace

cudaError_t grouped_gemm_f32(TileConfig config, GroupedGemmArguments const& arguments,
                             cudaStream_t stream) {
  GroupedGemmArguments parts;
  cudaError_t const status = split_operands(arguments, parts, stream);
  if (status != cudaSuccess) return status;
  return with_tile(GroupedGemmTiles{}, config, [&](auto tile) {
    return with_bool(arguments.transpose_lhs, [&](auto transpose_lhs) {
      return with_bool(arguments.transpose_rhs, [&](auto transpose_rhs) {
        using cute::GMMA::Major;
        using Tile = decltype(tile);
        using Problem = ProductsOfParts<KernelConfig<
            cutlass::half_t, float, major(Major::K, transpose_lhs.value),
            major(Major::MN, transpose_rhs.value), Tile::kTileM, Tile::kTileN, Tile::kCluster>>;
        return launch_grouped_gemm<Problem, f32::Mainloop<Problem>>(parts, stream);
      });
    });
  });
}

}  // namespace jgg::sm90
