// From run-time arguments to one compiled FP8 kernel, and its launch.
#pragma once

#include <cuda_runtime.h>

#include "fp8/scaled_kernel.h"
#include "fp8/scaled_ragged_dot.h"
#include "fp8/scaled_tiles.h"
#include "sm90/config_of.h"
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

// `kType` is that of lhs.
template <class Tiles, template <class> class Problem, template <class> class Roles,
          bool kColumnScales, ElementType kType>
cudaError_t launch_scaled(TileConfig config, ScaledArguments const& arguments,
                          cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto rhs_type) {
        using Tile = decltype(tile);
        using Config = ScaledConfig<sm90::Typed<kType>, sm90::Typed<rhs_type>, Tile::kTileN,
                                    Tile::kCluster, kColumnScales>;
        return launch<Problem<Config>, Roles<Problem<Config>>>(arguments, stream);
      },
      OneTileOf<Tiles>{config}, OneOf<ElementType::kE4m3, ElementType::kE5m2>{arguments.rhs_type});
}

}  // namespace jgg::fp8
