// Gated activations and their derivatives, of one element. All activations have one form, whose
// coefficients are constants of the launch, because kernels with an instance for each function, or
// with a switch, spill registers.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>

#include "mlp/gated_ragged_dot.h"

namespace jgg::mlp {

// hidden = a(g) (u + shift), with g = min(gate, limit) and u = up clamped to +-limit, where
//
//   a(g) = g s (linear + squared g),  s = sigmoid(alpha g (1 + c[0] g^2 + c[1] g^4 + ...)).
//
// A gate times its sigmoid needs only one term, and so does the tanh form of gelu. `linear` is then
// 1 and `squared` 0.
//
// Gelu needs more terms. The logarithm of Phi(g) / (1 - Phi(g)) is odd, and a polynomial of degree
// 11 is fitted to it. Up to |g| = 5, Phi is off by 2.3e-7 at most, and the derivative of gelu by
// 3e-6. For larger |g|, `most_square` replaces g^2 in the polynomial. Relu is the limit of a large
// alpha: the sigmoid rises from 0 to 1 between two numbers far smaller than any 16-bit product. The
// derivative of relu at 0 is 0.
template <int kTerms_>
struct GatedForm {
  static constexpr int kTerms = kTerms_;
  static constexpr bool kIsGeneral = kTerms > 1;

  GatedForm() = default;
  explicit GatedForm(Activation const& a) : slope(a.alpha), limit(a.limit), shift(a.shift) {
    terms[0] = a.cubic;
    if constexpr (kIsGeneral) take(a.function);
    // 1 / (1 + 2^power) is the sigmoid.
    power = -1.4426950408889634f * slope;
    for (int i = 0; i < kTerms; ++i) slopes[i] = float(2 * i + 3) * slope * terms[i];
  }

  float power;
  float terms[kTerms] = {};
  // The derivative of the sigmoid's argument: slope + slopes[0] g^2 + slopes[1] g^4 + ...
  float slope;
  float slopes[kTerms];
  float limit;
  float shift;
  float most_square = FLT_MAX;
  float linear = 1.0f;
  float squared = 0.0f;
  float slope_at_zero = 0.5f;  // of the activation

 private:
  void take(Function function) {
    constexpr float kSteep = 0x1p100f;
    constexpr float kGelu[] = {1.595764403684768f,     0.07268943990620473f,
                               -8.98447067648868e-05f, -0.00010069811378211934f,
                               6.193451927739846e-06f, -1.3260438506967898e-07f};
    switch (function) {
      case Function::kSigmoid:
        break;
      case Function::kGelu:
        slope = kGelu[0];
        for (int i = 0; i < kTerms; ++i) terms[i] = kGelu[i + 1] / kGelu[0];
        most_square = 25.0f;
        break;
      case Function::kSquaredRelu:
        linear = 0.0f;
        squared = 1.0f;
        [[fallthrough]];
      case Function::kRelu:
        slope = kSteep;
        slope_at_zero = 0.0f;
    }
  }
};

using GatedFunction = GatedForm<1>;
using GeneralFunction = GatedForm<5>;

// The results for one gate and one up, both of which are rounded to the type in which they are
// stored.
struct Gated {
  float activation;
  float up;          // what the activation is multiplied by
  float derivative;  // of the activation with respect to gate
  float up_slope;    // of `up` with respect to the argument; 0 where the argument is clamped
};

// Returns the smaller of `limit` and x. NaN stays NaN, whereas fminf would return the limit.
__device__ inline float at_most(float limit, float x) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(limit));
  return least;
}

// Returns 1 / (1 + 2^power).
__device__ inline float sigmoid(float power) {
  // `volatile` keeps the compiler from interleaving the arithmetic of many elements, for which an
  // epilogue has no registers.
  float exponential, inverse;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(power));
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exponential));
  return inverse;
}

// Returns whether hidden is gate sigmoid(alpha gate) up. This takes two thirds of the arithmetic of
// other activations.
inline bool is_plain(Activation const& a) {
  return a.function == Function::kSigmoid && a.cubic == 0.0f && a.shift == 0.0f &&
         a.limit == INFINITY;
}

// Forms of activations with code of their own. kPlain is gate sigmoid(alpha gate) up, kGated any
// other activation with Function::kSigmoid, and kGeneral any activation. kUngated is any activation
// without an up, and kNone is no activation.
enum class Form : int { kPlain, kGated, kGeneral, kUngated, kNone };

inline Form form_of(Activation const& a, bool has_up) {
  if (!has_up) return Form::kUngated;
  if (a.function != Function::kSigmoid) return Form::kGeneral;
  return is_plain(a) ? Form::kPlain : Form::kGated;
}

// Computes all results for a gate and an up. The compiler drops the results that are not used. If
// two forms have the same function, their results have the same bits, except for infinite gates and
// for the sign of zeros.
template <bool kIsPlain = false, int kTerms>
__device__ __forceinline__ Gated gated(GatedForm<kTerms> const& by, float gate, float up) {
  if constexpr (kIsPlain) {
    float const s = sigmoid(by.power * gate), activation = gate * s;
    return {activation, up, s + activation * (1.0f - s) * by.slope, 1.0f};
  }
  using Form = GatedForm<kTerms>;
  float const g = at_most(by.limit, gate);
  float const u = -at_most(by.limit, -at_most(by.limit, up));
  // An infinite square times a term of zero would be NaN.
  float const square = at_most(Form::kIsGeneral ? by.most_square : FLT_MAX, g * g);
  float sum = by.terms[kTerms - 1], slope = by.slopes[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) {
    sum = sum * square + by.terms[i];
    slope = slope * square + by.slopes[i];
  }
  slope = slope * square + by.slope;
  float const s = sigmoid(by.power * g * (1.0f + sum * square));
  float activation = g * s, derivative = s;
  if constexpr (Form::kIsGeneral) {
    derivative = s * by.linear + 2.0f * by.squared * activation;
    activation *= by.linear + by.squared * g;
  }
  derivative += activation * (1.0f - s) * slope;
  if constexpr (Form::kIsGeneral) derivative = g == 0.0f ? by.slope_at_zero : derivative;
  return {activation, u + by.shift, derivative * float(g == gate), float(u == up)};
}

}  // namespace jgg::mlp
