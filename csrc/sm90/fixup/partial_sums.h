// Partial sums of one tile on their way from one thread block to another, through the workspace.
#pragma once

#include "scheduler/partial_sums.h"
#include "sm90/config.h"
#include "sm90/fixup/announcement.h"

namespace jgg::sm90 {

// Returns the number of clusters whose sums the workspace has room for.
template <class Config>
int64_t max_clusters(PartialSumsWorkspace const& workspace) {
  return workspace.slots / kConsumers / Config::kCluster;
}

// The partial sums of one consumer. A slot, as schedules number them, has room for the sums of a
// cluster. Blocks of the same rank in their clusters compute the same tile of a unit, and threads
// of the same number compute the same elements. A thread therefore reads what its counterpart
// wrote, and the order in memory is the fastest one: neighbouring threads side by side, one sum at
// a time. Several sums at a time would have to be in consecutive registers.
//
// `accumulators(i)` is sum i of a thread.
template <class Config>
class PartialSums {
 public:
  static constexpr int kFloats = kRowsPerConsumer * Config::kTileN;

  __device__ PartialSums(PartialSumsWorkspace const& workspace, int consumer)
      : workspace_(workspace), consumer_(consumer) {}

  // Hands the sums over to a block of another cluster, which adds them to its own.
  template <class Accumulators>
  __device__ void hand_over(int cluster_slot, Accumulators const& accumulators) const {
    int const slot = slot_of(cluster_slot);
    float* const to = own_sums(slot);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) __stcg(to + i * kWarpgroup, accumulators(i));
    sync_consumer(consumer_);
    if (is_first()) announce(sums(slot), workspace_.announcements + slot);
    // Sync so that no thread runs ahead. Without this barrier the FP8 kernel runs out of registers,
    // and the compiler keeps the mainloop's counters in local memory.
    sync_consumer(consumer_);
  }

  // accumulators += the sums that another cluster hands over.
  template <class Accumulators>
  __device__ void add(int cluster_slot, Accumulators&& accumulators) const {
    int const slot = slot_of(cluster_slot);
    if (is_first()) await(sums(slot), workspace_.announcements + slot);
    sync_consumer(consumer_);
    float const* const from = own_sums(slot);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) accumulators(i) += __ldcg(from + i * kWarpgroup);
  }

 private:
  static constexpr int kOwn = kFloats / kWarpgroup;  // of each thread

  __device__ static bool is_first() { return threadIdx.x % kWarpgroup == 0; }

  // Returns the slot of this consumer's sums, which is also that of its counterpart.
  __device__ int slot_of(int cluster_slot) const {
    return (cluster_slot * Config::kCluster + blockIdx.x % Config::kCluster) * kConsumers +
           consumer_;
  }

  __device__ float* sums(int slot) const { return workspace_.sums + int64_t(slot) * kFloats; }

  __device__ float* own_sums(int slot) const { return sums(slot) + threadIdx.x % kWarpgroup; }

  PartialSumsWorkspace const& workspace_;
  int consumer_;
};

}  // namespace jgg::sm90
