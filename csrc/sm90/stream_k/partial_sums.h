// Partial sums of one tile on their way from one thread block to another, through the workspace.
#pragma once

#include "sm90/kernel_config.h"
#include "sm90/stream_k/announcement.h"
#include "sm90/stream_k/workspace.h"

namespace jgg::sm90::stream_k {

// The sums of one consumer. A slot, as schedules number them, has room for those of a cluster.
// Blocks of the same rank in their clusters compute the same tile of a unit, and threads of the
// same number the same elements, so a thread reads what its counterpart wrote, in whatever order is
// fastest: 16 bytes at a time, neighbours side by side.
template <class Config>
class PartialSums {
 public:
  static constexpr int kFloats = kRowsPerConsumer * Config::kTileN;

  __device__ PartialSums(Workspace const& workspace, int consumer)
      : workspace_(workspace), consumer_(consumer) {}

  // Gives these sums away, to be added by a block of another cluster.
  template <class Accumulators>
  __device__ void hand_over(int cluster_slot, Accumulators const& accumulators) const {
    int const slot = slot_of(cluster_slot);
    float4* const to = vectors(slot);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      __stcg(to + i * kWarpgroup, float4{accumulators(4 * i), accumulators(4 * i + 1),
                                         accumulators(4 * i + 2), accumulators(4 * i + 3)});
    }
    sync_warpgroup(1 + consumer_);
    if (is_first()) announce(sums(slot), workspace_.announcements + slot);
  }

  // accumulators += the sums that another cluster hands over.
  template <class Accumulators>
  __device__ void add(int cluster_slot, Accumulators& accumulators) const {
    int const slot = slot_of(cluster_slot);
    if (is_first()) await(sums(slot), workspace_.announcements + slot);
    sync_warpgroup(1 + consumer_);
    float4 const* const from = vectors(slot);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float4 const partial = __ldcg(from + i * kWarpgroup);
      accumulators(4 * i) += partial.x;
      accumulators(4 * i + 1) += partial.y;
      accumulators(4 * i + 2) += partial.z;
      accumulators(4 * i + 3) += partial.w;
    }
  }

 private:
  static constexpr int kVectors = kFloats / kWarpgroup / 4;  // of each thread

  __device__ static bool is_first() { return threadIdx.x % kWarpgroup == 0; }

  // Of this consumer, or its counterpart, among those of its cluster.
  __device__ int slot_of(int cluster_slot) const {
    return (cluster_slot * Config::kCluster + blockIdx.x % Config::kCluster) * kConsumers +
           consumer_;
  }

  __device__ float* sums(int slot) const { return workspace_.sums + int64_t(slot) * kFloats; }

  __device__ float4* vectors(int slot) const {
    return reinterpret_cast<float4*>(sums(slot)) + threadIdx.x % kWarpgroup;
  }

  Workspace const& workspace_;
  int consumer_;
};

}  // namespace jgg::sm90::stream_k
