// Functions of the driver for device memory, normally distributed data and timing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace driver {

inline void require(cudaError_t status, char const* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Returns uninitialised device memory, which is freed with the last pointer to it.
inline std::shared_ptr<void> allocate(size_t bytes) {
  void* data = nullptr;
  require(cudaMalloc(&data, std::max<size_t>(bytes, 1)), "cudaMalloc");
  return {data, [](void* p) { cudaFree(p); }};
}

template <class T>
std::shared_ptr<void> to_device(std::vector<T> const& values) {
  auto const data = allocate(values.size() * sizeof(T));
  require(cudaMemcpy(data.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  return data;
}

__host__ __device__ inline uint64_t hash(uint64_t x) {
  // This is the finaliser of SplitMix64.
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Returns a number in (0, 1], uniformly distributed if the bits are random.
__device__ inline float uniform(uint32_t bits) { return (bits + 1.0f) * 0x1p-32f; }

__device__ inline float normal(uint64_t bits) {
  float const radius = sqrtf(-2.0f * logf(uniform(static_cast<uint32_t>(bits))));
  return radius * cospif(2.0f * uniform(static_cast<uint32_t>(bits >> 32)));
}

// The standard deviation of FP8 data: about a quarter of FP8's range, as after a quantiser.
constexpr float kFp8Spread = 100.0f;

__device__ inline void store_normal(__nv_bfloat16& to, uint64_t bits) { to = normal(bits); }
__device__ inline void store_normal(__nv_fp8_e4m3& to, uint64_t bits) {
  to = __nv_fp8_e4m3(kFp8Spread * normal(bits));
}
__device__ inline void store_normal(double& to, uint64_t bits) { to = normal(bits); }
// A float is a scale, so it is positive.
__device__ inline void store_normal(float& to, uint64_t bits) {
  to = (0.5f + uniform(static_cast<uint32_t>(bits))) / kFp8Spread;
}

// A sum to which a kernel adds a product. It is much larger than the product alone.
struct Sum {
  float value;
};
__device__ inline void store_normal(Sum& to, uint64_t bits) { to.value = 1000.0f * normal(bits); }

template <class T>
__global__ void fill_random(T* data, size_t count, uint64_t seed) {
  size_t const stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    store_normal(data[i], hash(seed ^ hash(i)));
  }
}

// Returns normally distributed data, or scales if T is float. With zeros, kernels would draw less
// power and run faster.
template <class T>
std::shared_ptr<void> random_data(size_t count, uint64_t seed) {
  auto const data = allocate(count * sizeof(T));
  fill_random<<<1024, 256>>>(static_cast<T*>(data.get()), count, seed);
  require(cudaGetLastError(), "fill_random");
  return data;
}

static __global__ void read_all(uint4 const* data, size_t count, unsigned* never) {
  size_t const stride = size_t(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint4 const x = data[i];
    sum += x.x ^ x.y ^ x.z ^ x.w;
  }
  // All data are zeros, so nothing is written, but the compiler does not know that.
  if (sum != 0) *never = sum;
}

// Reads other memory, so that the L2 cache holds no operands, and no lines to be written back.
class CacheFlush {
 public:
  CacheFlush() : data_(allocate(kBytes)) {
    require(cudaMemset(data_.get(), 0, kBytes), "cudaMemset");
  }

  void operator()() const {
    read_all<<<1024, 256>>>(static_cast<uint4 const*>(data_.get()), kBytes / sizeof(uint4),
                            static_cast<unsigned*>(data_.get()));
  }

 private:
  static constexpr size_t kBytes = 256 << 20;
  std::shared_ptr<void> data_;
};

// Keeps the device busy until the host has queued the launch that is timed. Otherwise the host's
// time for the launch would be measured too.
static __global__ void hold(uint64_t nanoseconds) {
  auto const now = [] {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  };
  for (uint64_t const start = now(); now() - start < nanoseconds;) {
  }
}

// Returns the sorted microseconds of `rounds` launches. Each launch has a cold cache, and follows a
// pause in which the chip cools down. One more launch comes first and is not counted.
template <class Launch>
std::vector<float> time_launches(Launch const& launch, int rounds, int pause_us) {
  static CacheFlush const flush;
  cudaEvent_t start, end;
  require(cudaEventCreate(&start), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int round = 0; round <= rounds; ++round) {
    flush();
    require(cudaDeviceSynchronize(), "flush");
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    hold<<<1, 1>>>(50'000);
    cudaEventRecord(start);
    require(launch(), "launch");
    cudaEventRecord(end);
    require(cudaDeviceSynchronize(), "kernel");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
    if (round > 0) times.push_back(milliseconds * 1000);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times;
}

}  // namespace driver
