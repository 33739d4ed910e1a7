// The cluster that a thread block is in.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/barrier.h"

namespace jgg::sm90 {

template <class Config>
__device__ int rank_in_cluster() {
  return Config::kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
}

// After arrive_at_cluster(), wait_for_cluster() waits until all threads of the cluster have
// arrived. The arrival is relaxed: it orders only the initialisation of barriers, and only together
// with fence_barriers().
__device__ inline void arrive_at_cluster() {
  fence_compiler();
  cute::cluster_arrive_relaxed();
}
__device__ inline void wait_for_cluster() {
  cute::cluster_wait();
  fence_compiler();
}

template <class Config>
__device__ void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    fence_compiler();
    cute::cluster_sync();
    fence_compiler();
  } else {
    __syncthreads();
  }
}

}  // namespace jgg::sm90
