// From run-time arguments to one compiled FP8 kernel, and its launch.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "fp8/scaled_kernel.h"
#include "fp8/scaled_ragged_dot.h"
#include "fp8/scaled_tiles.h"
#include "sm90/persistent_launch.h"

namespace jgg::fp8 {

template <class Problem, class Roles>
cudaError_t launch(ScaledArguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  return sm90::launch_persistent<Config, sizeof(ScaledSharedStorage<Config>)>(
      scaled_kernel<Problem, Roles>, params, Problem::max_units(arguments), stream);
}

template <template <class> class Problem, template <class> class Roles, bool kColumnScales,
          class Lhs, class Rhs, class Tiles>
cudaError_t launch_tile(Tiles, TileConfig config, ScaledArguments const& arguments,
                        cudaStream_t stream) {
  return sm90::with_tile(Tiles{}, config, [&](auto tile) {
    using Tile = decltype(tile);
    using Config = ScaledConfig<Lhs, Rhs, Tile::kTileN, Tile::kCluster, kColumnScales>;
    return launch<Problem<Config>, Roles<Problem<Config>>>(arguments, stream);
  });
}

// The lhs type is the caller's, so that translation units of one each compile side by side.
template <template <class> class Problem, bool kColumnScales, class Lhs,
          template <class> class Roles = WholeTiles, class Tiles>
cudaError_t launch_scaled(Tiles tiles, TileConfig tile, ScaledArguments const& arguments,
                          cudaStream_t stream) {
  return arguments.rhs_type == ElementType::kE4m3
             ? launch_tile<Problem, Roles, kColumnScales, Lhs, cutlass::float_e4m3_t>(
                   tiles, tile, arguments, stream)
             : launch_tile<Problem, Roles, kColumnScales, Lhs, cutlass::float_e5m2_t>(
                   tiles, tile, arguments, stream);
}

}  // namespace jgg::fp8
