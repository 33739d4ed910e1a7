// Launches of kernels whose blocks come in clusters, persistent ones among them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "multiprocessors.h"
#include "sm90/config.h"

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

// Launches a cluster for each pair of multiprocessors, or for each of `max_units` units of work if
// those are fewer. kSharedBytes: of each thread block.
template <class Config, int kSharedBytes = sizeof(SharedStorage<Config>), class Params>
cudaError_t launch_persistent(void (*kernel)(Params), Params const& params, int64_t max_units,
                              cudaStream_t stream) {
  int multiprocessors;
  cudaError_t const status = count_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;
  int64_t const most =
      std::clamp<int64_t>(multiprocessors / Config::kCluster, 1, kMaxClusters<Config>);
  int64_t const clusters = std::min<int64_t>(most, std::max<int64_t>(max_units, 1));
  return launch_clusters<Config, kSharedBytes>(kernel, params, clusters, kThreads, stream);
}

}  // namespace jgg::sm90
