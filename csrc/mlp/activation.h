// Gated activations and their derivatives, of one element.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "mlp/gated_ragged_dot.h"

namespace jgg::mlp {

// An Activation as kernels compute it: what depends on the parameters alone is a constant of the
// launch.
struct GatedFunction {
  GatedFunction() = default;
  explicit GatedFunction(Activation const& a)
      : power(-1.4426950408889634f * a.alpha),
        cubic(a.cubic),
        slope(a.alpha),
        slope_of_square(3.0f * a.alpha * a.cubic),
        limit(a.limit),
        shift(a.shift) {}

  // sigmoid(alpha g (1 + cubic g^2)) = 1 / (1 + 2^(power g (1 + cubic g^2)))
  float power;
  float cubic;
  // The derivative of what the sigmoid is taken of: slope + slope_of_square g^2.
  float slope;
  float slope_of_square;
  float limit;
  float shift;
};

// Of gate and up, each rounded to the type in which it is stored.
struct Gated {
  float activation;
  float up;          // what the activation is multiplied by
  float derivative;  // of the activation by gate
  float up_slope;    // of `up` by the argument: 0 where it is clamped
};

// A NaN stays one: fminf would return the limit.
__device__ inline float at_most(float limit, float x) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(limit));
  return least;
}

// 1 / (1 + 2^power).
__device__ inline float sigmoid(float power) {
  // Volatile keeps one element's arithmetic from being spread over that of many others, for which
  // an epilogue has no registers.
  float exponential, inverse;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(power));
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exponential));
  return inverse;
}

// Whether it is gate sigmoid(alpha gate) up, which takes two thirds of the arithmetic.
inline bool is_plain(Activation const& a) {
  return a.cubic == 0.0f && a.shift == 0.0f && a.limit == INFINITY;
}

// The compiler drops what is not used of the result.
template <bool kIsPlain = false>
__device__ Gated gated(GatedFunction const& by, float gate, float up) {
  if constexpr (kIsPlain) {
    float const s = sigmoid(by.power * gate), activation = gate * s;
    return {activation, up, s + activation * (1.0f - s) * by.slope, 1.0f};
  }
  float const g = at_most(by.limit, gate);
  float const u = -at_most(by.limit, -at_most(by.limit, up));
  float const square = g * g;
  float const s = sigmoid(by.power * g * (1.0f + by.cubic * square));
  float const activation = g * s;
  float const derivative = s + activation * (1.0f - s) * (by.slope + by.slope_of_square * square);
  return {activation, u + by.shift, derivative * float(g == gate), float(u == up)};
}

}  // namespace jgg::mlp
