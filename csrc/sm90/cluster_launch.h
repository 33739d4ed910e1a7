// The launch of a kernel whose blocks come in clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/kernel_config.h"

namespace jgg::sm90 {

// Launches blocks of so many threads in so many clusters. kSharedBytes: of each block.
template <class Config, int kSharedBytes, class Params>
cudaError_t launch_clusters(void (*kernel)(Params), Params const& params, int64_t clusters,
                            int threads, cudaStream_t stream) {
  static_assert(kSharedBytes <= kSharedMemoryLimit, "the stages leave no room for the barriers");
  cudaError_t const status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kCluster, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(clusters * Config::kCluster);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace jgg::sm90
