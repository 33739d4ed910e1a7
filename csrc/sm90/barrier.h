// Shared-memory barriers and the ring of stages that they guard.
#pragma once

#include <cutlass/arch/barrier.h>

namespace jgg::sm90 {

// An mbarrier that also orders ordinary loads and stores: CUTLASS's is volatile but clobbers
// nothing, so the compiler may move a plain shared-memory read above its wait, or a write below its
// arrival.
struct Barrier : cutlass::arch::ClusterTransactionBarrier {
  __device__ void wait(unsigned phase) const {
    cutlass::arch::ClusterTransactionBarrier::wait(phase);
    asm volatile("" ::: "memory");
  }
  // An arrival that says that what was written before it is there.
  __device__ void publish() const {
    asm volatile("" ::: "memory");
    arrive();
  }
  __device__ uint64_t* address() { return &barrier_; }
};

// By one thread.
template <int kBarriers>
__device__ void set_arrivals(Barrier (&barriers)[kBarriers], int arrivals) {
  for (int i = 0; i < kBarriers; ++i) barriers[i].init(arrivals);
}

// Position in a ring of kStages. The phase flips each time round; a producer starts one phase ahead
// because every stage starts out empty.
template <int kStages>
struct StageIterator {
  int stage = 0;
  unsigned phase = 0;

  __device__ void operator++() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  __device__ void operator+=(int steps) {
    int const sum = stage + steps;
    phase ^= sum / kStages % 2;
    stage = sum % kStages;
  }
};

// Named barriers of a block, each the first of two, one for either consumer. 0 belongs to
// __syncthreads, and CUTLASS keeps a few of the last.
enum NamedBarrier : int { kConsumerBarrier = 1, kMultiplyTurn = 3, kStoreTurn = 5 };

// Of all threads of one consumer.
__device__ inline void sync_consumer(int consumer) {
  cutlass::arch::NamedBarrier::sync(128, kConsumerBarrier + consumer);
}

}  // namespace jgg::sm90
