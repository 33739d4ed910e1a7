// Elements in memory, and the values that the kernels compute with.
#pragma once

#include <cuda_runtime.h>

#include "scheduler/host_device.h"

namespace jgg::fp64 {

template <class Real>
struct alignas(2 * sizeof(Real)) Complex {
  Real re;
  Real im;
};

using Complex64 = Complex<float>;
using Complex128 = Complex<double>;

// Returns a part of a value. A real value has one part, and a complex value has two.
JGG_HOST_DEVICE double part(double x, int) { return x; }
template <class Real>
JGG_HOST_DEVICE double part(Complex<Real> x, int index) {
  return index == 0 ? x.re : x.im;
}

// The double-precision type in which products of an element are accumulated.
template <class Element>
struct ValueOf {
  using Type = Complex128;
  static constexpr int kParts = 2;
};
template <>
struct ValueOf<double> {
  using Type = double;
  static constexpr int kParts = 1;
};
template <class Element>
using Value = typename ValueOf<Element>::Type;

JGG_HOST_DEVICE double widen(double x) { return x; }
template <class Real>
JGG_HOST_DEVICE Complex128 widen(Complex<Real> x) {
  return {x.re, x.im};
}

template <class Element>
JGG_HOST_DEVICE Element narrow(Value<Element> x) {
  if constexpr (ValueOf<Element>::kParts == 1) {
    return x;
  } else {
    return {static_cast<decltype(Element::re)>(x.re), static_cast<decltype(Element::re)>(x.im)};
  }
}

JGG_HOST_DEVICE double plus(double a, double b) { return a + b; }
JGG_HOST_DEVICE Complex128 plus(Complex128 a, Complex128 b) { return {a.re + b.re, a.im + b.im}; }

JGG_HOST_DEVICE double times(double a, double b) { return a * b; }
JGG_HOST_DEVICE Complex128 times(Complex128 a, Complex128 b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

JGG_HOST_DEVICE double conjugate(double x) { return x; }
JGG_HOST_DEVICE Complex128 conjugate(Complex128 x) { return {x.re, -x.im}; }

JGG_HOST_DEVICE double real_part(double x) { return x; }
JGG_HOST_DEVICE Complex128 real_part(Complex128 x) { return {x.re, 0.0}; }

JGG_HOST_DEVICE bool is_zero(double x) { return x == 0.0; }
JGG_HOST_DEVICE bool is_zero(Complex128 x) { return x.re == 0.0 && x.im == 0.0; }

JGG_HOST_DEVICE bool is_one(Complex128 x) { return x.re == 1.0 && x.im == 0.0; }

// Returns x / conjugate(x), which has magnitude one. x is scaled first, because its squares may
// overflow or underflow.
JGG_HOST_DEVICE Complex128 over_conjugate(Complex128 x) {
  double const re = x.re < 0 ? -x.re : x.re, im = x.im < 0 ? -x.im : x.im;
  double const scale = re < im ? im : re;
  Complex128 const unit{x.re / scale, x.im / scale};
  double const norm = unit.re * unit.re + unit.im * unit.im;
  Complex128 const square = times(unit, unit);
  return {square.re / norm, square.im / norm};
}

}  // namespace jgg::fp64
