// Orders two consumers that take turns at something that only one of them may do at a time. It is
// like `cutlass::OrderedSequenceBarrier`, which takes any number of consumers.
#pragma once

#include "sm90/config.h"

namespace jgg::sm90 {

// A consumer has to wait once for each turn that is passed to it, including the turn after the last
// tile, so that no arrival is left over.
class OrderBarrier {
 public:
  // The first turn is consumer 0's.
  __device__ OrderBarrier(NamedBarrier what, int consumer) : what_(what), consumer_(consumer) {
    if (consumer_ == 1) pass();
  }

  __device__ void wait() const { sync_named(kThreadsOfTwo, id(consumer_)); }
  __device__ void pass() const { arrive_named(kThreadsOfTwo, id(1 - consumer_)); }

 private:
  static constexpr int kThreadsOfTwo = kConsumers * kWarpgroup;
  __device__ int id(int consumer) const { return what_ + consumer; }

  NamedBarrier what_;
  int consumer_;
};

}  // namespace jgg::sm90
