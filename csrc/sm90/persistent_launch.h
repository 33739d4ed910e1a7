// The launch that all persistent kernels have in common.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "multiprocessors.h"
#include "sm90/cluster_launch.h"
#include "sm90/kernel_config.h"

namespace jgg::sm90 {

// Launches a cluster for each pair of multiprocessors, or for each of `max_units` units of work if
// those are fewer. kSharedBytes: of each thread block.
template <class Config, int kSharedBytes = sizeof(SharedStorage<Config>) + 1024,  // to align it
          class Params>
cudaError_t launch_persistent(void (*kernel)(Params), Params const& params, int64_t max_units,
                              cudaStream_t stream) {
  int multiprocessors;
  cudaError_t const status = count_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;
  int64_t const most = std::min(multiprocessors / Config::kCluster, kMaxClusters<Config>);
  int64_t const clusters = std::min<int64_t>(most, std::max<int64_t>(max_units, 1));
  return launch_clusters<Config, kSharedBytes>(kernel, params, clusters, kThreads, stream);
}

}  // namespace jgg::sm90
