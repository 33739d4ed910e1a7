// Gated activations and their derivatives, of one element.
#pragma once

#include <cuda_runtime.h>

#include "mlp/gated_ragged_dot.h"

namespace jgg::mlp {

// Of gate and up, each rounded to the type in which it is stored.
struct Gated {
  float activation;
  float up;          // what the activation is multiplied by
  float derivative;  // of the activation by gate
  float up_slope;    // of `up` by the argument: 0 where it is clamped
};

__device__ inline float sigmoid(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  // Volatile keeps one element's arithmetic from being spread over that of many others, for which
  // an epilogue has no registers.
  float power, inverse;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * x));
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

// The compiler drops what is not used of the result.
__device__ inline Gated gated(Activation const& by, float gate, float up) {
  // A NaN stays one: fminf would return the limit.
  float const g = gate > by.limit ? by.limit : gate;
  float const u = up > by.limit ? by.limit : up < -by.limit ? -by.limit : up;
  float const square = by.cubic * g * g;
  float const s = sigmoid(by.alpha * g * (1.0f + square));
  float const slope = by.alpha * (1.0f + 3.0f * square);
  float const derivative = s + g * s * (1.0f - s) * slope;
  return {g * s, u + by.shift, gate > by.limit ? 0.0f : derivative, u == up ? 1.0f : 0.0f};
}

}  // namespace jgg::mlp
