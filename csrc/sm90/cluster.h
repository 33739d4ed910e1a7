// The cluster that a thread block is in.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/barrier.h"

namespace jgg::sm90 {

template <class Config>
__device__ int rank_in_cluster() {
  return Config::kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
}

// Says that this thread has made its barriers, and waits until all threads of the cluster have.
// They are made with a fence of their own, which is all that this one orders.
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
