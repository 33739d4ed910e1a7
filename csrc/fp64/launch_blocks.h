// The launch that all kernels of the FP64 tensor cores share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "fp64/kernel_config.h"
#include "multiprocessors.h"

namespace jgg::fp64 {

// Launches as many blocks as the device can hold, or one for each tile if there are fewer tiles.
template <class Config, class Params>
cudaError_t launch_blocks(void (*kernel)(Params), Params const& params, int tiles,
                          cudaStream_t stream) {
  int multiprocessors;
  cudaError_t status = count_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Config::kSharedBytes);
  if (status != cudaSuccess) return status;

  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(std::min(multiprocessors * Config::kBlocks, tiles));
  launch.blockDim = dim3(Config::kThreads);
  launch.dynamicSmemBytes = Config::kSharedBytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

// Returns whether rows of `contiguous` elements from `data` on begin at multiples of 16 bytes.
template <class Element>
bool has_wide_units(void const* data, int contiguous) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && contiguous * sizeof(Element) % 16 == 0;
}

}  // namespace jgg::fp64
