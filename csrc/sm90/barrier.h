// Shared-memory barriers and the ring of stages that they guard.
//
// CUTLASS 4.2's barriers and fences are volatile, so the compiler keeps their order among each
// other. They do not clobber memory, so the compiler may move an ordinary load or store across
// them. The barriers and fences of this file and of cluster.h are compiler fences too, and no other
// file uses CUTLASS's. A function here that epilogues call repeatedly is a single statement. With
// three statements the compiler did not inline loops that call it, and serialised their WGMMAs
// (C7520).
#pragma once

#include <cutlass/arch/barrier.h>

namespace jgg::sm90 {

// No load or store is moved across it by the compiler; it is no instruction.
__device__ __forceinline__ void fence_compiler() { asm volatile("" ::: "memory"); }

// An mbarrier. Accesses after wait() do not begin before it, and accesses before an arrival do not
// move past it.
struct Barrier : private cutlass::arch::ClusterTransactionBarrier {
  using Base = cutlass::arch::ClusterTransactionBarrier;
  using Base::init;

  __device__ void wait(unsigned phase) const {
    Base::wait(phase);
    fence_compiler();
  }
  __device__ void arrive() const {
    fence_compiler();
    Base::arrive();
  }
  // In the CTA `cta` of the cluster, if `arrives`.
  __device__ void arrive(int cta, bool arrives) const {
    fence_compiler();
    Base::arrive(cta, arrives);
  }
  __device__ void arrive_and_expect_tx(unsigned bytes) const {
    fence_compiler();
    Base::arrive_and_expect_tx(bytes);
  }
  // Once all cp.async of this thread have arrived.
  __device__ void arrive_after_copies() {
    fence_compiler();
    cutlass::arch::cpasync_barrier_arrive_noinc(address());
  }
  __device__ uint64_t* address() { return &barrier_; }
};

// Before copies and products, which reach shared memory by another way, read what this thread wrote
// there, or write where it read. The threads that begin them wait for this one behind the fence.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// By one thread.
template <int kBarriers>
__device__ void set_arrivals(Barrier (&barriers)[kBarriers], int arrivals) {
  for (int i = 0; i < kBarriers; ++i) barriers[i].init(arrivals);
}

// Behind it, by the same thread: the cluster and copies see them as they were made.
__device__ __forceinline__ void fence_barriers() {
  fence_compiler();
  cutlass::arch::fence_barrier_init();
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

// Named barriers of a block, each the first of two, one for either consumer. CUTLASS keeps the
// first 8 of the 16 that there are for itself.
enum NamedBarrier : int { kConsumerBarrier = 1, kMultiplyOrder = 3, kStoreOrder = 5 };
constexpr int kReservedBarriers = cutlass::arch::NamedBarrier::ReservedNamedBarrierCount;

__device__ __forceinline__ void sync_named(int threads, int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier + kReservedBarriers), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int threads, int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier + kReservedBarriers), "r"(threads) : "memory");
}

// Syncs all threads of one consumer.
__device__ inline void sync_consumer(int consumer) { sync_named(128, kConsumerBarrier + consumer); }

}  // namespace jgg::sm90
