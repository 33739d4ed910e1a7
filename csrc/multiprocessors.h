// How many multiprocessors a launch can fill.
#pragma once

#include <cuda_runtime.h>

namespace jgg {

// Of the largest chip of this generation.
constexpr int kMostMultiprocessors = 144;

inline cudaError_t count_multiprocessors(int& count) {
  int device;
  cudaError_t const status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace jgg
