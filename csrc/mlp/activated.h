// The activations of forward kernels, all in one form that they take from the launch: a gate times
// a sigmoid of an odd polynomial of it. An instance for each, or a switch, has spills.
#pragma once

#include <cfloat>

#include "mlp/activation.h"

namespace jgg::mlp {

// s = sigmoid(alpha g (1 + c[0] g^2 + c[1] g^4 + ...)), where g^2 is cut at `most_square`; the
// activation is g s (linear + squared g).
//
// Gelu is one: the logarithm of Phi(g) / (1 - Phi(g)) is odd, and up to |g| = 5 a polynomial of
// degree 11, fitted for this, gives Phi to 2.3e-7, beyond it the slope at the end. Relu is the
// limit of a large alpha, which turns 0 into 1 between two numbers far smaller than any 16-bit
// product.
struct GeneralFunction {
  static constexpr int kTerms = 5;

  GeneralFunction() = default;
  explicit GeneralFunction(Activation const& a)
      : power(a.alpha), most_square(FLT_MAX), linear(1.0f), limit(a.limit), shift(a.shift) {
    constexpr float kSteep = 0x1p100f;
    constexpr float kGelu[] = {1.595764403684768f,     0.07268943990620473f,
                               -8.98447067648868e-05f, -0.00010069811378211934f,
                               6.193451927739846e-06f, -1.3260438506967898e-07f};
    switch (a.function) {
      case Function::kGelu:
        power = kGelu[0];
        for (int i = 0; i < kTerms; ++i) terms[i] = kGelu[i + 1] / kGelu[0];
        most_square = 25.0f;
        break;
      case Function::kSquaredRelu:
        linear = 0.0f;
        squared = 1.0f;
        [[fallthrough]];
      case Function::kRelu:
        power = kSteep;
        break;
      default:
        terms[0] = a.cubic;
    }
    // 1 / (1 + 2^power) is the sigmoid.
    power *= -1.4426950408889634f;
  }

  float power;
  float terms[kTerms] = {};
  float most_square;
  float linear;
  float squared = 0.0f;
  float limit;
  float shift;
};

// Of an activation and what it is multiplied by. What `gated()` computes comes out the same.
struct Activated {
  float activation;
  float up;
};

__device__ __forceinline__ Activated activated(GeneralFunction const& by, float gate, float up) {
  float const g = at_most(by.limit, gate);
  float const u = -at_most(by.limit, -at_most(by.limit, up));
  float const square = at_most(by.most_square, g * g);
  float sum = by.terms[GeneralFunction::kTerms - 1];
#pragma unroll
  for (int i = GeneralFunction::kTerms - 2; i >= 0; --i) sum = sum * square + by.terms[i];
  float const s = sigmoid(by.power * g * (1.0f + sum * square));
  return {g * s * (by.linear + by.squared * g), u + by.shift};
}

__device__ __forceinline__ Activated activated(GatedFunction const& by, float gate, float up) {
  Gated const a = gated(by, gate, up);
  return {a.activation, a.up};
}

}  // namespace jgg::mlp
