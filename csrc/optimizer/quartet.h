// Four consecutive elements in registers: what a thread loads and stores at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "types.h"

namespace jgg::optimizer {

constexpr int kQuartet = 4;

template <ElementType kType>
using StoredAs = std::conditional_t<kType == ElementType::kBf16, __nv_bfloat16,
                                    std::conditional_t<kType == ElementType::kF16, __half, float>>;

template <class T>
struct Quartet {
  using Vector = std::conditional_t<sizeof(T) == sizeof(float), float4, uint2>;
  T x[kQuartet];

  // Reads the first `count` elements, and zeros for the rest. `kAligned` says that quartets start
  // at multiples of their size and are all there or not at all.
  template <bool kAligned>
  __device__ __forceinline__ static Quartet load(T const* from, int count) {
    Quartet quartet{};
    if constexpr (kAligned) {
      if (count > 0) {
        Vector const vector = __ldcs(reinterpret_cast<Vector const*>(from));
        memcpy(quartet.x, &vector, sizeof(vector));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kQuartet; ++i) {
        if (i < count) quartet.x[i] = from[i];
      }
    }
    return quartet;
  }

  // Of `element(i)`, rounded to the nearest.
  template <class Element>
  __device__ __forceinline__ static Quartet of(Element element) {
    Quartet quartet;
#pragma unroll
    for (int i = 0; i < kQuartet; ++i) quartet.x[i] = static_cast<T>(element(i));
    return quartet;
  }

  __device__ __forceinline__ float operator[](int i) const { return static_cast<float>(x[i]); }

  // Writes the first `count` elements.
  template <bool kAligned>
  __device__ __forceinline__ void store(T* to, int count) const {
    if constexpr (kAligned) {
      if (count > 0) {
        Vector vector;
        memcpy(&vector, x, sizeof(vector));
        __stcs(reinterpret_cast<Vector*>(to), vector);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kQuartet; ++i) {
        if (i < count) to[i] = x[i];
      }
    }
  }
};

// Stores a quartet in another type.
template <bool kAligned, class T>
__device__ __forceinline__ void store_as(T* to, Quartet<float> const& quartet, int count) {
  Quartet<T>::of([&](int i) { return quartet[i]; }).template store<kAligned>(to, count);
}

}  // namespace jgg::optimizer
