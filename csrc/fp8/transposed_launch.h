// From run-time arguments to one compiled transposed FP8 kernel.
#pragma once

#include <cutlass/numeric_types.h>

#include "fp8/scaled_tiles.h"
#include "fp8/transposed_mainloop.h"
#include "sm90/transposed/launch.h"

namespace jgg::fp8 {

template <class Config>
cudaError_t launch_transposed_kernel(ScaledArguments const& arguments, cudaStream_t stream) {
  using Problem = TransposedNoncontracting<Config>;
  typename Problem::Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  return sm90::transposed::launch<Problem, TransposedMainloop<Problem>>(
      params, Problem::max_units(arguments), stream);
}

// The lhs type is the caller's, so that translation units of one each compile side by side.
template <class Lhs, class... Tiles>
cudaError_t launch_transposed(TileList<Tiles...>, ScaledTile tile, ScaledArguments const& arguments,
                              cudaStream_t stream) {
  using cutlass::float_e4m3_t, cutlass::float_e5m2_t;
  cudaError_t status = cudaErrorInvalidConfiguration;
  auto const matches = [&](auto candidate) {
    using Tile = decltype(candidate);
    if (tile.tile_m != Tile::kTileM || tile.tile_n != Tile::kTileN ||
        tile.cluster != Tile::kCluster) {
      return false;
    }
    using Shape = sm90::transposed::Shape<Tile::kTileM, Tile::kTileN, Tile::kBlocks>;
    status = arguments.rhs_type == Fp8Type::kE4M3
                 ? launch_transposed_kernel<TransposedConfig<Lhs, float_e4m3_t, Shape>>(arguments,
                                                                                        stream)
                 : launch_transposed_kernel<TransposedConfig<Lhs, float_e5m2_t, Shape>>(arguments,
                                                                                        stream);
    return true;
  };
  (matches(Tiles{}) || ...);
  return status;
}

}  // namespace jgg::fp8
