// The elements of a float32 operand that a lane takes at once, and their conversion to parts.
#pragma once

#include <cstdint>

#include "sm90/float16_parts.h"

namespace jgg::parts {

constexpr int kVector = 8;  // elements a lane takes at once: 16 bytes of each part

struct Vector {
  alignas(16) float x[kVector];

  __device__ explicit Vector(float const* from) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      reinterpret_cast<float4&>(x[i]) = *reinterpret_cast<float4 const*>(from + i);
    }
  }
};

// The bits of x's magnitude, which sort as magnitudes do. NaN and infinity do not count: scaled by
// them, nothing else would be left of their group.
__device__ inline unsigned finite_magnitude(float x) {
  unsigned const bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

// A maximum is raised a few times and compared with often.
__device__ inline void raise(unsigned* maximum, unsigned to) {
  if (to > *reinterpret_cast<unsigned volatile*>(maximum)) atomicMax(maximum, to);
}

__device__ inline float scale_of(unsigned maximum) {
  return sm90::power_of_two(sm90::scale_exponent(maximum));
}

// Stores the parts of `vector` at element `at`, the low ones unless `low` is null. `scale_at(i)` is
// the scale of the vector's element i.
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
