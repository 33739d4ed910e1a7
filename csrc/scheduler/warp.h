// The warp-wide operations that the tile schedulers need, once for a real warp and once for a
// simulated one. Schedulers use only these operations, so tests on the CPU run the same code as the
// device.
#pragma once

#include <algorithm>
#include <array>

#include "scheduler/host_device.h"

namespace jgg {

constexpr int kWarpSize = 32;

// 32 lanes held in an array: `Int` is one value per lane.
struct SimulatedWarp {
  using Int = std::array<int, kWarpSize>;

  // Returns whether this is the lane that writes what all lanes have computed.
  static bool leads() { return true; }

  static Int lanes() {
    Int lane;
    for (int i = 0; i < kWarpSize; ++i) lane[i] = i;
    return lane;
  }

  template <class Function, class... Ints>
  static Int map(Function function, Ints const&... values) {
    Int result;
    for (int i = 0; i < kWarpSize; ++i) result[i] = function(values[i]...);
    return result;
  }

  // Calls function(lane) for every lane. Afterwards total() and most() combine the sums that lanes
  // collected in a variable. On a GPU each lane has its own variable.
  template <class Function>
  static void each(Function function) {
    for (int i = 0; i < kWarpSize; ++i) function(i);
  }
  static int total(int sum) { return sum; }
  static int most(int maximum) { return maximum; }

  // Returns the inclusive scan of `value` under an associative operation.
  template <class Operation>
  static Int scan(Int value, Operation operation) {
    for (int i = 1; i < kWarpSize; ++i) value[i] = operation(value[i - 1], value[i]);
    return value;
  }

  // Hands each lane's value to the lane above it. Lane 0 gets `first`.
  static Int shift_up(Int value, int first) {
    for (int i = kWarpSize - 1; i > 0; --i) value[i] = value[i - 1];
    value[0] = first;
    return value;
  }

  static int read(Int const& value, int lane) { return value[lane]; }

  static int min(Int const& value) { return *std::min_element(value.begin(), value.end()); }

  // Returns how many lanes hold a non-zero value.
  static int count(Int const& value) {
    return kWarpSize - int(std::count(value.begin(), value.end(), 0));
  }

  // Returns the first lane that holds a non-zero value, or kWarpSize.
  static int first(Int const& value) {
    for (int i = 0; i < kWarpSize; ++i) {
      if (value[i]) return i;
    }
    return kWarpSize;
  }
};

#ifdef __CUDACC__
// A real warp: `Int` is this lane's value. Every function is called by all 32 lanes together.
struct DeviceWarp {
  using Int = int;

  __device__ static bool leads() { return threadIdx.x % kWarpSize == 0; }

  __device__ static Int lanes() { return threadIdx.x % kWarpSize; }

  template <class Function, class... Ints>
  __device__ static Int map(Function function, Ints const&... values) {
    return function(values...);
  }

  template <class Function>
  __device__ static void each(Function function) {
    function(lanes());
  }
  __device__ static int total(int sum) { return __reduce_add_sync(~0u, sum); }
  __device__ static int most(int maximum) { return __reduce_max_sync(~0u, maximum); }

  template <class Operation>
  __device__ static Int scan(Int value, Operation operation) {
    int const lane = lanes();
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      int const left = __shfl_up_sync(~0u, value, distance);
      if (lane >= distance) value = operation(left, value);
    }
    return value;
  }

  __device__ static Int shift_up(Int value, int first) {
    int const below = __shfl_up_sync(~0u, value, 1);
    return lanes() == 0 ? first : below;
  }

  __device__ static int read(Int const& value, int lane) { return __shfl_sync(~0u, value, lane); }

  __device__ static int min(Int const& value) { return __reduce_min_sync(~0u, value); }

  __device__ static int count(Int const& value) { return __popc(__ballot_sync(~0u, value != 0)); }

  __device__ static int first(Int const& value) {
    unsigned const ballot = __ballot_sync(~0u, value != 0);
    return ballot ? __ffs(ballot) - 1 : kWarpSize;
  }
};

// Tells the compiler that all lanes of a warp have the same value. Values that follow from it, such
// as the descriptors of WGMMA operands, then go to uniform registers.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }
#endif

}  // namespace jgg
