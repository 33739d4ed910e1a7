// Finds the largest magnitude of several numbers without unpacking them: it compares loaded words,
// which hold two 16-bit numbers each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jgg::quantize {

template <class Source>
struct Word {
  static constexpr int kElements = 4 / sizeof(Source);

  __device__ __forceinline__ static float element(uint32_t word, int i) {
    if constexpr (std::is_same_v<Source, float>) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<Source, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (i % 2 * 16))));
    }
  }

  __device__ __forceinline__ static uint32_t magnitude(uint32_t word) {
    return word & (kElements == 1 ? 0x7fffffffu : 0x7fff7fffu);
  }

  // Returns the larger magnitude of each element. NaN does not count.
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    if constexpr (std::is_same_v<Source, float>) {
      return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    } else {
      using Pair = std::conditional_t<std::is_same_v<Source, __half>, __half2, __nv_bfloat162>;
      Pair x, y;
      memcpy(&x, &a, sizeof(x));
      memcpy(&y, &b, sizeof(y));
      x = __hmax2(x, y);
      uint32_t result;
      memcpy(&result, &x, sizeof(result));
      return result;
    }
  }

  // Returns a word whose elements all are the largest element of `word`.
  __device__ __forceinline__ static uint32_t fold(uint32_t word) {
    return kElements == 1 ? word : max(word, __funnelshift_l(word, word, 16));
  }

  // Returns the maximum over the threads whose indices differ from this thread's only in the bits
  // of value `first` to `threads` / 2. All threads of the warp call it.
  __device__ __forceinline__ static uint32_t max_over(uint32_t word, int threads, int first = 1) {
#pragma unroll
    for (int distance = threads / 2; distance >= first; distance /= 2) {
      word = max(word, __shfl_xor_sync(~0u, word, distance));
    }
    return word;
  }

  __device__ __forceinline__ static bool any_infinite(uint32_t magnitudes) {
    bool infinite = false;
#pragma unroll
    for (int i = 0; i < kElements; ++i) infinite |= element(magnitudes, i) == INFINITY;
    return infinite;
  }

  // Replaces infinities by NaN.
  __device__ __forceinline__ static uint32_t poison(uint32_t word) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      uint32_t const bits = kElements == 1 ? 0x7fffffffu : 0x7fffu << (i * 16);
      if (fabsf(element(word, i)) == INFINITY) word |= bits;
    }
    return word;
  }
};

// Packs two numbers into a word, each rounded to the nearest number of a 16-bit type.
template <class Source>
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  uint32_t word;
  if constexpr (std::is_same_v<Source, __half>) {
    __half2 const pair = __floats2half2_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  } else {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

}  // namespace jgg::quantize
