// From run-time arguments to one compiled kernel, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "sm90/kernel.h"
#include "sm90/ragged_dot.h"
#include "sm90/tile_table.h"

namespace jgg::sm90 {

template <class Problem>
cudaError_t launch(RaggedDotArguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;

  int device, multiprocessors;
  status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;

  auto const kernel = ragged_kernel<Problem>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Config>) + 1024;  // to align it
  static_assert(kSharedBytes <= kSharedMemoryLimit, "the stages leave no room for the barriers");
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  int64_t const clusters = std::min<int64_t>(multiprocessors / Config::kCluster,
                                             std::max<int64_t>(Problem::max_units(arguments), 1));
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kCluster, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(clusters * Config::kCluster);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

// Turns a run-time boolean into a compile-time one.
template <class Function>
cudaError_t with_bool(bool value, Function function) {
  return value ? function(std::true_type{}) : function(std::false_type{});
}

constexpr cute::GMMA::Major major(cute::GMMA::Major plain, bool transpose) {
  using cute::GMMA::Major;
  return (plain == Major::K) != transpose ? Major::K : Major::MN;
}

// Picks the entry of the table that `config` names and hands it to `function`.
template <class... Tiles, class Function>
cudaError_t with_tile(TileTable<Tiles...>, TileConfig config, Function function) {
  cudaError_t status = cudaErrorInvalidConfiguration;
  auto const matches = [&](auto tile) {
    using Tile = decltype(tile);
    if (config.tile_m != Tile::kTileM || config.tile_n != Tile::kTileN ||
        config.cluster != Tile::kCluster) {
      return false;
    }
    status = function(tile);
    return true;
  };
  (matches(Tiles{}) || ...);
  return status;
}

// Launches the kernel of a family, `Problem`. `kLhsMajor` and `kRhsMajor` are the majors of
// operands that are not transposed.
template <template <class> class Problem, class Element, cute::GMMA::Major kLhsMajor,
          cute::GMMA::Major kRhsMajor>
cudaError_t launch_any(TileConfig config, RaggedDotArguments const& arguments,
                       cudaStream_t stream) {
  return with_tile(RaggedDotTiles{}, config, [&](auto tile) {
    return with_bool(arguments.transpose_lhs, [&](auto transpose_lhs) {
      return with_bool(arguments.transpose_rhs, [&](auto transpose_rhs) {
        return with_bool(arguments.out_type == ElementType::kF32, [&](auto f32_out) {
          using Tile = decltype(tile);
          using Output = std::conditional_t<f32_out.value, float, Element>;
          using Config = KernelConfig<Element, Output, major(kLhsMajor, transpose_lhs.value),
                                      major(kRhsMajor, transpose_rhs.value), Tile::kTileM,
                                      Tile::kTileN, Tile::kCluster>;
          return launch<Problem<Config>>(arguments, stream);
        });
      });
    });
  });
}

}  // namespace jgg::sm90
