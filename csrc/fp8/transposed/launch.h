// From run-time arguments to one compiled kernel for groups of few rows, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "fp8/scaled_tiles.h"
#include "fp8/transposed/kernel.h"
#include "multiprocessors.h"
#include "sm90/config_of.h"

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

}  // namespace jgg::fp8::transposed

namespace jgg::fp8 {

template <ElementType kType>
cudaError_t scaled_noncontracting_swapped(TileConfig config, ScaledArguments const& arguments,
                                          cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto rhs_type) {
        using Tile = decltype(tile);
        using Config = transposed::KernelConfig<sm90::Typed<kType>, sm90::Typed<rhs_type>,
                                                Tile::kTileM, Tile::kTileN>;
        return transposed::launch<transposed::Noncontracting<Config>>(arguments, stream);
      },
      OneTileOf<SwappedTiles>{config},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{arguments.rhs_type});
}

}  // namespace jgg::fp8
