// From run-time arguments to one compiled FP8 kernel, and its launch.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <algorithm>

#include "fp8/scaled_kernel.h"
#include "fp8/scaled_ragged_dot.h"
#include "fp8/scaled_tiles.h"

namespace jgg::fp8 {

template <class Problem>
cudaError_t launch(ScaledArguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;

  int device, multiprocessors;
  status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;

  auto const kernel = scaled_kernel<Problem>;
  constexpr int kSharedBytes = sizeof(ScaledSharedStorage<Config>);
  static_assert(kSharedBytes <= sm90::kSharedMemoryLimit,
                "the stages leave no room for the barriers");
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  int64_t const clusters = std::min<int64_t>(multiprocessors / Config::kCluster,
                                             std::max<int64_t>(Problem::max_units(arguments), 1));
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kCluster, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(clusters * Config::kCluster);
  launch.blockDim = dim3(sm90::kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <template <class> class Problem, bool kColumnScales, class Lhs, class Rhs, class... Tiles>
cudaError_t launch_tile(TileList<Tiles...>, ScaledTile tile, ScaledArguments const& arguments,
                        cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidConfiguration;
  auto const matches = [&](auto candidate) {
    using Tile = decltype(candidate);
    if (tile.tile_m != Tile::kTileM || tile.tile_n != Tile::kTileN ||
        tile.cluster != Tile::kCluster) {
      return false;
    }
    using Config = ScaledConfig<Lhs, Rhs, Tile::kTileN, Tile::kMmaN, Tile::kCluster, kColumnScales>;
    status = launch<Problem<Config>>(arguments, stream);
    return true;
  };
  (matches(Tiles{}) || ...);
  return status;
}

// The lhs type is the caller's, so that translation units of one each compile side by side.
template <template <class> class Problem, bool kColumnScales, class Lhs, class Tiles>
cudaError_t launch_scaled(Tiles tiles, ScaledTile tile, ScaledArguments const& arguments,
                          cudaStream_t stream) {
  return arguments.rhs_type == Fp8Type::kE4M3
             ? launch_tile<Problem, kColumnScales, Lhs, cutlass::float_e4m3_t>(tiles, tile,
                                                                               arguments, stream)
             : launch_tile<Problem, kColumnScales, Lhs, cutlass::float_e5m2_t>(tiles, tile,
                                                                               arguments, stream);
}

}  // namespace jgg::fp8
