// From run-time arguments to one compiled kernel for groups of few rows, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "multiprocessors.h"
#include "scaled/swapped_noncontracting.h"
#include "scaled/tiles.h"
#include "sm90/config_of.h"
#include "sm90/swapped_scaled_kernel.h"

namespace jgg::sm90 {

// Launches as many blocks as run at the same time, or one for each unit of work if those are fewer.
template <class Problem>
cudaError_t launch_swapped_scaled(ScaledArguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;

  int multiprocessors;
  status = count_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;

  auto const kernel = swapped_scaled_kernel<Problem>;
  constexpr int kSharedBytes = sizeof(SwappedScaledStorage<Config>);
  static_assert(kSharedBytes <= Config::kSharedMemory, "the stages leave no room for the ring");
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  int64_t const most = int64_t(multiprocessors) * kSwappedBlocks;
  int64_t const blocks = std::min(most, std::max<int64_t>(Problem::max_units(arguments), 1));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <ElementType kType>
cudaError_t scaled_noncontracting_swapped(TileConfig config, ScaledArguments const& arguments,
                                          cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto rhs_type) {
        using Tile = decltype(tile);
        using Config =
            SwappedScaledConfig<Typed<kType>, Typed<rhs_type>, Tile::kTileM, Tile::kTileN>;
        return launch_swapped_scaled<SwappedScaledNoncontracting<Config>>(arguments, stream);
      },
      OneTileOf<ScaledSwappedTiles>{config},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{arguments.rhs_type});
}

}  // namespace jgg::sm90
