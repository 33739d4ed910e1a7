// From run-time element types to template arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "fp8/quantize.h"

namespace jgg::fp8 {

template <class T>
struct Type {
  using type = T;
};

template <class Function>
cudaError_t with_source(ElementType source, Function function) {
  switch (source) {
    case ElementType::kBf16:
      return function(Type<__nv_bfloat16>{});
    case ElementType::kF16:
      return function(Type<__half>{});
    default:
      return function(Type<float>{});
  }
}

// Calls `function` with the source's type, and the FP8 format and `aligned` as integral constants.
template <class Function>
cudaError_t with_format(QuantizeFormat format, bool aligned, Function function) {
  return with_source(format.source, [&](auto source) {
    auto const with_fp8 = [&](auto fp8) {
      return aligned ? function(source, fp8, std::true_type{})
                     : function(source, fp8, std::false_type{});
    };
    return format.fp8 == ElementType::kE4m3
               ? with_fp8(std::integral_constant<ElementType, ElementType::kE4m3>{})
               : with_fp8(std::integral_constant<ElementType, ElementType::kE5m2>{});
  });
}

inline int blocks_of(int size) { return size / kScaleBlock + (size % kScaleBlock != 0); }

}  // namespace jgg::fp8
