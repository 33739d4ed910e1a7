// The CUTLASS types of run-time element types, and the kernel configurations that follow from them.
#pragma once

#include <cutlass/numeric_types.h>

#include "dispatch.h"
#include "sm90/config.h"

namespace jgg::sm90 {

// The CUTLASS type of operands and results.
template <ElementType>
struct TypeOf;
template <>
struct TypeOf<ElementType::kBf16> {
  using Type = cutlass::bfloat16_t;
};
template <>
struct TypeOf<ElementType::kF16> {
  using Type = cutlass::half_t;
};
template <>
struct TypeOf<ElementType::kF32> {
  using Type = float;
};
template <>
struct TypeOf<ElementType::kE4m3> {
  using Type = cutlass::float_e4m3_t;
};
template <>
struct TypeOf<ElementType::kE5m2> {
  using Type = cutlass::float_e5m2_t;
};
template <ElementType kType>
using Typed = typename TypeOf<kType>::Type;

template <class Tile, class Element, class Output, Major kLhsMajor, Major kRhsMajor>
using ConfigOf = KernelConfig<Element, Output, kLhsMajor, kRhsMajor, Tile::kTileM, Tile::kTileN,
                              Tile::kCluster, Tile::kKind>;

}  // namespace jgg::sm90
