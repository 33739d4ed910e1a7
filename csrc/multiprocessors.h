// The number of multiprocessors that a launch can fill.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

namespace jgg {

// Multiprocessors of the largest chip of this generation.
constexpr int kMostMultiprocessors = 144;

// Sets `count` to the number of multiprocessors of the current device, but at most to `max_sms`.
inline cudaError_t count_multiprocessors(int& count, int max_sms = kMostMultiprocessors) {
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) count = std::min(count, max_sms);
  return status;
}

}  // namespace jgg
