// From run-time arguments to one compiled kernel whose last wave is cut along K, and its launch.
#pragma once

#include <algorithm>

#include "sm90/launch.h"
#include "sm90/stream_k/kernel.h"
#include "sm90/stream_k/problem.h"
#include "sm90/stream_k/tile_table.h"

namespace jgg::sm90::stream_k {

template <class Problem>
cudaError_t launch_pieces(RaggedDotArguments const& arguments, cudaStream_t stream) {
  typename Problem::Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  int64_t const clusters = std::min(Assignment::kClustersAUnit * Problem::max_units(arguments),
                                    max_clusters<typename Problem::Config>(params.workspace));
  return launch_persistent<typename Problem::Config>(stream_k_kernel<Problem, Mainloop<Problem>>,
                                                     params, clusters, stream);
}

// lhs [m, k] is contiguous along K and `kRhsMajor` the major of an rhs that is not transposed.
template <class Element, cute::GMMA::Major kRhsMajor>
cudaError_t launch_any(TileConfig config, RaggedDotArguments const& arguments,
                       cudaStream_t stream) {
  if (arguments.transpose_lhs) return cudaErrorInvalidConfiguration;
  return with_tile(Tiles{}, config, [&](auto tile) {
    return with_bool(arguments.transpose_rhs, [&](auto transpose_rhs) {
      return with_bool(arguments.out_type == ElementType::kF32, [&](auto f32_out) {
        using Tile = decltype(tile);
        using Output = std::conditional_t<f32_out.value, float, Element>;
        using Config = KernelConfig<Element, Output, cute::GMMA::Major::K,
                                    major(kRhsMajor, transpose_rhs.value), Tile::kTileM,
                                    Tile::kTileN, Tile::kCluster>;
        return launch_pieces<RaggedNoncontracting<Config>>(arguments, stream);
      });
    });
  });
}

}  // namespace jgg::sm90::stream_k
