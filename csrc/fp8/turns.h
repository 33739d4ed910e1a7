// The consumers' turns at the tensor cores.
#pragma once

#include <cutlass/arch/barrier.h>

#include "fp8/scaled_config.h"

namespace jgg::fp8 {

// Without turns the consumers may be in step: the tensor cores work on a slice of each at once,
// both are done at the same time and promote at the same time, and nothing is multiplied meanwhile.
// A consumer therefore takes its turn before it issues a slice, and passes it on once it has issued
// it: so one promotes while the other multiplies, and the tensor cores never wait for a consumer to
// notice that the other one's slice is done. Where a consumer's own slices overlap, turns are of
// half a step.
template <class Config>
class Turns {
 public:
  static constexpr bool kTaken = is_ordered(Config::kSchedule);
  static constexpr int kPerStep = is_overlapped(Config::kSchedule) ? 1 : Config::kSlices;

  // The first consumer begins.
  __device__ explicit Turns(int consumer) : consumer_(consumer) {
    if (consumer == 1) pass();
  }

  __device__ void take() const {
    if constexpr (kTaken) {
      cutlass::arch::NamedBarrier::sync(kConsumers * kWarpgroup, kFirstBarrier + consumer_);
    }
  }

  __device__ void pass() const {
    if constexpr (kTaken) {
      cutlass::arch::NamedBarrier::arrive(kConsumers * kWarpgroup, kFirstBarrier + 1 - consumer_);
    }
  }

  // A step in which this consumer multiplies nothing.
  __device__ void skip_step() const {
#pragma unroll
    for (int turn = 0; turn < kPerStep; ++turn) {
      take();
      pass();
    }
  }

  // Both consumers have had the same number of turns; the last one that was passed on is taken.
  __device__ void end() const {
    if (consumer_ == 0) take();
  }

 private:
  static_assert(kConsumers == 2);
  static constexpr int kFirstBarrier = 1 + kConsumers;  // after those of sync_warpgroup

  int consumer_;
};

}  // namespace jgg::fp8
