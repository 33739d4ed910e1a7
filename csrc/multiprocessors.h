// How many multiprocessors a launch can fill.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

namespace jgg {

// Of the largest chip of this generation.
constexpr int kMostMultiprocessors = 144;

// The most that launches of a thread fill while an object of this class is there, so that what runs
// beside them has the others.
class MultiprocessorLimit {
 public:
  explicit MultiprocessorLimit(int most) : outer_(most_) { most_ = std::min(most, outer_); }
  ~MultiprocessorLimit() { most_ = outer_; }
  MultiprocessorLimit(MultiprocessorLimit const&) = delete;
  MultiprocessorLimit& operator=(MultiprocessorLimit const&) = delete;

  static int most() { return most_; }

 private:
  static inline thread_local int most_ = kMostMultiprocessors;

  int outer_;
};

inline cudaError_t count_multiprocessors(int& count) {
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) count = std::min(count, MultiprocessorLimit::most());
  return status;
}

}  // namespace jgg
