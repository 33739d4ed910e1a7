// Translates the element types of buffers to the types of the kernels.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

constexpr std::pair<::xla::ffi::DataType, ElementType> kElementTypes[] = {
    {::xla::ffi::BF16, ElementType::kBf16},     {::xla::ffi::F16, ElementType::kF16},
    {::xla::ffi::F32, ElementType::kF32},       {::xla::ffi::F64, ElementType::kF64},
    {::xla::ffi::C64, ElementType::kC64},       {::xla::ffi::C128, ElementType::kC128},
    {::xla::ffi::F8E4M3FN, ElementType::kE4m3}, {::xla::ffi::F8E5M2, ElementType::kE5m2},
};

// Sets `result` to the kernels' type. Returns false if the type is not one of `among`.
inline bool element_type(::xla::ffi::DataType type, std::initializer_list<ElementType> among,
                         ElementType& result) {
  for (auto const& [known, of_kernels] : kElementTypes) {
    if (known != type) continue;
    result = of_kernels;
    return std::find(among.begin(), among.end(), result) != among.end();
  }
  return false;
}

constexpr auto kFloats = {ElementType::kBf16, ElementType::kF16, ElementType::kF32};
constexpr auto kFloat8s = {ElementType::kE4m3, ElementType::kE5m2};
constexpr auto kDoubles = {ElementType::kF64, ElementType::kC64, ElementType::kC128};

// Returns whether the kernels multiply operands of the first type into a result of the second type,
// which has to be the operands' type or float32.
inline bool are_products(::xla::ffi::DataType operand, ::xla::ffi::DataType result,
                         ElementType& type, ElementType& out_type) {
  return element_type(operand, kFloats, type) && element_type(result, kFloats, out_type) &&
         (out_type == type || out_type == ElementType::kF32);
}

}  // namespace jgg
