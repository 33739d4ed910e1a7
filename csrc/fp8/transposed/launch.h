// From run-time arguments to one compiled kernel for groups of few rows, and its launch.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <algorithm>

#include "fp8/scaled_tiles.h"
#include "fp8/transposed/kernel.h"
#include "multiprocessors.h"

namespace jgg::fp8::transposed {

// Launches as many blocks as run at the same time, or one for each unit of work if those are fewer.
template <class Problem>
cudaError_t launch(ScaledArguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;

  int multiprocessors;
  status = count_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;

  auto const kernel = transposed_kernel<Problem>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Config>);
  static_assert(kSharedBytes <= Config::kSharedMemory, "the stages leave no room for the ring");
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  int64_t const most = int64_t(multiprocessors) * kBlocks;
  int64_t const blocks = std::min(most, std::max<int64_t>(Problem::max_units(arguments), 1));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(sm90::kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

// The lhs type is the caller's, so that translation units of one each compile side by side.
template <class Lhs>
cudaError_t launch_any(TileConfig config, ScaledArguments const& arguments, cudaStream_t stream) {
  return sm90::with_tile(SwappedTiles{}, config, [&](auto tile) {
    using Tile = decltype(tile);
    auto const with_rhs = [&](auto rhs) {
      using Config = KernelConfig<Lhs, decltype(rhs), Tile::kTileM, Tile::kTileN>;
      return launch<Noncontracting<Config>>(arguments, stream);
    };
    return arguments.rhs_type == ElementType::kE4m3 ? with_rhs(cutlass::float_e4m3_t{})
                                                    : with_rhs(cutlass::float_e5m2_t{});
  });
}

}  // namespace jgg::fp8::transposed
