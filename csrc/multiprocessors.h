// The number of multiprocessors that a launch can fill.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

namespace jgg {

// Multiprocessors of the largest chip of this generation.
constexpr int kMostMultiprocessors = 144;

// Sets `count` to how many multiprocessors a launch on this device fills, `max_sms` at most.
inline cudaError_t count_multiprocessors(int& count, int max_sms = kMostMultiprocessors) {
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) count = std::min(count, max_sms);
  return status;
}

}  // namespace jgg
