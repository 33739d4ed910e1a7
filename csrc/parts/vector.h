// Loads the elements of a float32 operand that a lane handles at once, and converts them to parts.
#pragma once

#include <cstdint>

#include "sm90/float16_parts.h"

namespace jgg::parts {

constexpr int kVector = 8;  // elements that a lane handles at once: 16 bytes of each part

struct Vector {
  alignas(16) float x[kVector];

  __device__ explicit Vector(float const* from) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      reinterpret_cast<float4&>(x[i]) = *reinterpret_cast<float4 const*>(from + i);
    }
  }
};

// Returns the bits of x's magnitude, which have the same order as magnitudes. Returns 0 for NaN and
// infinity, because a scale that follows from them would make the rest of their group zero.
__device__ inline unsigned finite_magnitude(float x) {
  unsigned const bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

// Raises `maximum` to at least `to`. Compares first, because most calls need no atomic operation.
__device__ inline void raise(unsigned* maximum, unsigned to) {
  if (to > *reinterpret_cast<unsigned volatile*>(maximum)) atomicMax(maximum, to);
}

__device__ inline float scale_of(unsigned maximum) {
  return sm90::power_of_two(sm90::scale_exponent(maximum));
}

// Stores the high parts of `vector` from high[at] on, and the low parts from low[at] on unless
// `low` is null. `scale_at(i)` returns the scale of the vector's element i.
template <class ScaleAt>
__device__ void store_parts(Vector const& vector, ScaleAt&& scale_at, __half* high, __half* low,
                            int64_t at) {
  alignas(16) __half highs[kVector];
  alignas(16) __half lows[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sm90::Parts const parts = sm90::split(vector.x[i] * scale_at(i));
    highs[i] = parts.high;
    lows[i] = parts.low;
  }
  *reinterpret_cast<uint4*>(high + at) = reinterpret_cast<uint4 const&>(highs);
  if (low) *reinterpret_cast<uint4*>(low + at) = reinterpret_cast<uint4 const&>(lows);
}

}  // namespace jgg::parts
