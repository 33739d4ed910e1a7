// How a float32 becomes bfloat16 parts that the tensor cores multiply.
//
// x = p0 + p1 + ..., where each part has the next eight bits of x. Three parts have all bits of x,
// and two parts leave out the last eight bits. Bfloat16 has the exponents of float32. These parts
// therefore need no scale, unlike the float16 parts of sm90/float16_parts.h, and no pass over a
// whole group first. In exchange a product needs more parts: float32 accuracy takes six products of
// three bfloat16 parts, but only three products of two float16 parts.
//
// Products of first parts are summed apart from all other products, which are corrections. If an
// operand is infinite, its second part is NaN, and so are the corrections, which are then dropped.
// The first part of a NaN must therefore be NaN too. It is the upper half of the float32, and this
// half is NaN in all NaNs that arithmetic produces.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

namespace jgg::sm90 {

// Splits two numbers. parts[i] has part i of `a` in its low half and part i of `b` in its high
// half.
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

// Returns the sum of the products of first parts, plus the sum of all other products if it is
// finite.
__device__ __forceinline__ float corrected(float sum, float correction) {
  return isfinite(correction) ? sum + correction : sum;
}

}  // namespace jgg::sm90
