// Translates the run-time format of a quantiser to template arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "dispatch.h"
#include "quantize/quantize.h"
#include "scheduler/ceil_div.h"
#include "tile_grid.h"

namespace jgg::quantize {

// The C++ type of a source's elements.
template <ElementType kType>
using SourceOf = std::conditional_t<kType == ElementType::kBf16, __nv_bfloat16,
                                    std::conditional_t<kType == ElementType::kF16, __half, float>>;

// Calls `function` with the source's type, the FP8 type and `aligned` as constants.
template <class Function>
cudaError_t with_format(QuantizeFormat format, bool aligned, Function function) {
  return with_constants(
      function, OneOf<ElementType::kBf16, ElementType::kF16, ElementType::kF32>{format.source},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.fp8}, Flag{aligned});
}

inline int blocks_of(int size) { return ceil_div(size, kScaleBlock); }

}  // namespace jgg::quantize
