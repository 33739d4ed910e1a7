// Shared-memory barriers and the ring of stages that they guard.
//
// CUTLASS 4.2's barriers and fences are volatile, so the compiler does not reorder them. They do
// not clobber memory, so the compiler may move an ordinary load or store across them. The barriers
// and fences of this file and of cluster.h are compiler fences too, and no other file uses
// CUTLASS's. A function here that epilogues call repeatedly is a single statement. With three
// statements the compiler did not inline loops that call it, and serialised their WGMMAs (C7520).
#pragma once

#include <cutlass/arch/barrier.h>

namespace jgg::sm90 {

// Keeps the compiler from moving loads and stores across it. It emits no instruction.
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
  // Arrives at this barrier of the CTA `cta` of the cluster, if `arrives`.
  __device__ void arrive(int cta, bool arrives) const {
    fence_compiler();
    Base::arrive(cta, arrives);
  }
  __device__ void arrive_and_expect_tx(unsigned bytes) const {
    fence_compiler();
    Base::arrive_and_expect_tx(bytes);
  }
  // Makes this thread arrive once all cp.async that it has issued are complete.
  __device__ void arrive_after_copies() {
    fence_compiler();
    cutlass::arch::cpasync_barrier_arrive_noinc(address());
  }
  __device__ uint64_t* address() { return &barrier_; }
};

// Orders this thread's accesses to shared memory before later TMA copies and WGMMAs, which access
// it through the async proxy. A thread that issues these has to wait at a barrier until this thread
// has passed the fence.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Initialises barriers that wait for `arrivals` arrivals. One thread calls it.
template <int kBarriers>
__device__ void set_arrivals(Barrier (&barriers)[kBarriers], int arrivals) {
  for (int i = 0; i < kBarriers; ++i) barriers[i].init(arrivals);
}

// Makes initialised barriers visible to the cluster and to copies. The thread that has initialised
// them calls it.
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

// Named barriers of a block. Each is the first of two: consumer i uses the barrier with the number
// `barrier + i`. CUTLASS reserves the first 8 of the 16 barriers.
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
