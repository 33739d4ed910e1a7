// The launch of a kernel for groups of few rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "sm90/transposed/kernel.h"

namespace jgg::sm90::transposed {

// Launches as many blocks as run at the same time, or one for each of `max_units` units of work if
// those are fewer.
template <class Problem, class Mainloop>
cudaError_t launch(typename Problem::Params const& params, int64_t max_units, cudaStream_t stream) {
  using Config = typename Problem::Config;
  int device, multiprocessors;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;

  auto const kernel = transposed_kernel<Problem, Mainloop>;
  constexpr int kSharedBytes = sizeof(typename Mainloop::Shared);
  static_assert(kSharedBytes <= Config::kSharedMemory, "the stages leave no room for the ring");
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  int64_t const most = int64_t(multiprocessors) * Config::kBlocks;
  int64_t const blocks = std::min(most, std::max<int64_t>(max_units, 1));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace jgg::sm90::transposed
