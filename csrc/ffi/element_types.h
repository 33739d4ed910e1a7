// Translates the element types of buffers to the types of the kernels.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "types.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// False if no kernel knows the type.
inline bool element_type(::xla::ffi::DataType type, ElementType& result) {
  using ::xla::ffi::DataType;
  switch (type) {
    case DataType::BF16:
      result = ElementType::kBf16;
      return true;
    case DataType::F16:
      result = ElementType::kF16;
      return true;
    case DataType::F32:
      result = ElementType::kF32;
      return true;
    case DataType::F64:
      result = ElementType::kF64;
      return true;
    case DataType::C64:
      result = ElementType::kC64;
      return true;
    case DataType::C128:
      result = ElementType::kC128;
      return true;
    case DataType::F8E4M3FN:
      result = ElementType::kE4m3;
      return true;
    case DataType::F8E5M2:
      result = ElementType::kE5m2;
      return true;
    default:
      return false;
  }
}

// False if the type is none of those.
inline bool element_type(::xla::ffi::DataType type, std::initializer_list<ElementType> among,
                         ElementType& result) {
  return element_type(type, result) && std::find(among.begin(), among.end(), result) != among.end();
}

constexpr auto kFloats = {ElementType::kBf16, ElementType::kF16, ElementType::kF32};
constexpr auto kFloat8s = {ElementType::kE4m3, ElementType::kE5m2};
constexpr auto kDoubles = {ElementType::kF64, ElementType::kC64, ElementType::kC128};

// Whether the kernels multiply operands of the first type into a result of the second: their own,
// or float32.
inline bool are_products(::xla::ffi::DataType operand, ::xla::ffi::DataType result,
                         ElementType& type, ElementType& out_type) {
  return element_type(operand, kFloats, type) && element_type(result, kFloats, out_type) &&
         (out_type == type || out_type == ElementType::kF32);
}

}  // namespace jgg
