// All blocks of a cooperative launch wait for each other once, though not with all of their
// threads.
#pragma once

#include <cooperative_groups.h>

#include <cuda/atomic>

#include "sm90/config.h"

namespace jgg::packed {

// The driver keeps a word for each launch, which `cooperative_groups::grid_group` waits by: blocks
// that arrive turn its first bit over together. That class wants all threads of a block to arrive,
// and to wait.
class GridBarrier {
  static constexpr unsigned kTurned = 1u << 31;
  using Word = cuda::atomic_ref<unsigned, cuda::thread_scope_device>;

 public:
  // By whoever waits, before the block arrives.
  __device__ GridBarrier() : before_(word().load(cuda::memory_order_relaxed)) {}

  // By one thread, behind a barrier with those that wrote what others are to read.
  __device__ static void arrive() {
    unsigned const others = gridDim.x - 1;
    word().fetch_add(blockIdx.x == 0 ? kTurned - others : 1, cuda::memory_order_release);
  }

  // By all threads of a warp.
  __device__ void wait() const {
    if (threadIdx.x % kWarpSize == 0) {
      while (((before_ ^ word().load(cuda::memory_order_acquire)) & kTurned) == 0) {
      }
    }
    __syncwarp();
  }

 private:
  __device__ static Word word() {
    return Word(
        *const_cast<unsigned*>(&cooperative_groups::details::get_grid_workspace()->barrier));
  }

  unsigned before_;
};

}  // namespace jgg::packed
