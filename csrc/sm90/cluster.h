// The cluster that a thread block is in.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

namespace jgg::sm90 {

template <class Config>
__device__ int rank_in_cluster() {
  return Config::kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
}

template <class Config>
__device__ void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }
}

}  // namespace jgg::sm90
