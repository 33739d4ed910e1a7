// FP8 operands and their results as the TMA descriptors see them.
#pragma once

#include "scaled/scaled_ragged_dot.h"
#include "sm90/tma/descriptor.h"

namespace jgg::sm90 {

// TMA has no FP8 types and needs none: nothing is converted on the way.
inline TensorView view_bytes(void const* data) { return {data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1}; }

inline TensorView view_out(void const* data, ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return {data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
    case ElementType::kF16:
      return {data, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
    default:
      return {data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};
  }
}

}  // namespace jgg::sm90
