// Operands and results as the TMA descriptors see them.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "sm90/tma/descriptor.h"

namespace jgg::sm90 {

template <class Element>
TensorView view(void const* data) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    return {data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizeof(Element)};
  } else if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return {data, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, sizeof(Element)};
  } else {
    static_assert(std::is_same_v<Element, float>, "no TMA type for this element");
    return {data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, sizeof(Element)};
  }
}

// Returns the view of an operand of a ragged product. If the contracted dimension is contiguous,
// boxes that are neighbours in memory belong to two steps, and L2 fetches the second box with the
// first. Otherwise neighbouring boxes are loaded together, and fetching both boxes for each load
// takes up to 6 % longer.
template <class Element>
TensorView operand_view(void const* data, bool contracted_is_contiguous) {
  TensorView operand = view<Element>(data);
  operand.fetch = contracted_is_contiguous ? kFetchTwoBoxes : kFetchBox;
  return operand;
}

}  // namespace jgg::sm90
