// Computes the scale of a block of numbers, and converts scaled numbers to FP8. Every operation
// here is an IEEE operation that the pure JAX reference also has, so that both compute the same
// bits.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>

#include "quantize/quantize.h"

namespace jgg::quantize {

template <ElementType kFormat>
struct Fp8Traits {
  static constexpr bool kIsE4m3 = kFormat == ElementType::kE4m3;
  static constexpr float kMax = kIsE4m3 ? 448.f : 57344.f;
  static constexpr auto kInterpretation = kIsE4m3 ? __NV_E4M3 : __NV_E5M2;
};

// Numbers are multiplied by the inverse, because a division for each number would take longer than
// the memory traffic.
struct Scale {
  float scale;
  float inverse;
};

// With a smaller scale, the inverse could overflow, and results would depend on whether denormal
// inputs are flushed to zero. With this scale, all denormal inputs round to zero.
constexpr float kSmallestScale = 0x1p-100f;

template <ElementType kFormat>
__device__ __forceinline__ Scale scale_of(float largest, bool power_of_two) {
  constexpr float kInverseMax = 1 / Fp8Traits<kFormat>::kMax;
  float scale = fmaxf(largest * kInverseMax, kSmallestScale);
  if (power_of_two) {
    scale = __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
  }
  if (largest < FLT_MIN) scale = 1;
  return {scale, __frcp_rn(scale)};
}

// Converts two numbers, the first to the low byte. Saturates, but keeps NaN.
template <ElementType kFormat>
__device__ __forceinline__ uint32_t convert(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE,
                                  Fp8Traits<kFormat>::kInterpretation);
}

// Converts four or eight numbers to ascending bytes. `value(i)` returns the i-th number, already
// scaled.
template <ElementType kFormat, class Value>
__device__ __forceinline__ uint32_t convert_four(Value value) {
  return convert<kFormat>(value(0), value(1)) | convert<kFormat>(value(2), value(3)) << 16;
}

template <ElementType kFormat, class Value>
__device__ __forceinline__ uint2 convert_eight(Value value) {
  return {convert_four<kFormat>(value), convert_four<kFormat>([&](int i) { return value(i + 4); })};
}

}  // namespace jgg::quantize
