// How a float32 becomes bfloat16 parts that the tensor cores multiply.
//
// x = p0 + p1 + ..., each part the next eight bits of x. Three parts are all of it, two leave out
// the last eight bits. Bfloat16 has the exponents of float32, so that, unlike the float16 parts of
// sm90/float16_parts.h, these need no scale, and nobody has to look at a whole group first. In
// exchange there are more of them: six products of three parts are as good as a product of float32,
// where three of two float16 parts would do.
//
// Products of first parts are kept apart from the others, which are corrections. Where an operand
// is infinite, its second part is NaN, and so are the corrections: they are dropped then. A NaN has
// to show in the first part, which is its upper half, as those do that arithmetic makes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

namespace jgg::sm90 {

// Splits two numbers: parts[i] has part i of both, that of the first in the low half.
template <int kParts>
__device__ __forceinline__ void split_bfloat16(float a, float b, uint32_t (&parts)[kParts]) {
  constexpr uint32_t kUpper = 0xffff0000;
#pragma unroll
  for (int i = 0; i + 1 < kParts; ++i) {
    parts[i] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    a -= __uint_as_float(__float_as_uint(a) & kUpper);
    b -= __uint_as_float(__float_as_uint(b) & kUpper);
  }
  __nv_bfloat162 const rest = __floats2bfloat162_rn(a, b);
  memcpy(&parts[kParts - 1], &rest, sizeof(rest));
}

// Adds the sum of all other products to that of the first parts.
__device__ __forceinline__ float corrected(float sum, float correction) {
  return isfinite(correction) ? sum + correction : sum;
}

}  // namespace jgg::sm90
