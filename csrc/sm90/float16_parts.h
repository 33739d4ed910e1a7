// How a float32 becomes float16 parts that the tensor cores multiply.
//
// A power of two for each group and operand brings the largest finite magnitude of the group to
// [2^14, 2^15). With this scale, x = high + low / 2^11 with both parts in float16: high has
// x's upper 11 bits, and low has the other 12 or 13 bits, rounded to 11. The product is then
//   x y = (high high') + (high low' + low high') / 2^11,
// without low low' / 2^22, which is as small as the rounding errors of float32. The factor 2^11
// (Ootomo and Yokota, 2022) keeps the low parts out of float16's subnormal numbers. Elements down
// to 2^-27 of the largest of their group are therefore split as precisely as the largest, and
// smaller elements lose precision gradually.
#pragma once

#include <cuda_fp16.h>

namespace jgg::sm90 {

constexpr float kLowScale = 2048;

__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Returns the exponent of the scale of a group whose largest finite magnitude has the bits
// `maximum`. If that magnitude is subnormal or nearly so, the scale is the largest one whose
// inverse is normal.
__device__ inline int scale_exponent(unsigned maximum) {
  int const exponent = int(maximum >> 23) - 127;
  return min(14 - exponent, 126);
}

struct Parts {
  __half high;
  __half low;
};

__device__ inline Parts split(float scaled) {
  __half const high = __float2half_rn(scaled);
  float const rest = scaled - __half2float(high);
  // If `high` is an infinity, `rest` is infinity minus infinity, which is NaN.
  return {high, __hisinf(high) ? __half(0) : __float2half_rn(rest * kLowScale)};
}

}  // namespace jgg::sm90
