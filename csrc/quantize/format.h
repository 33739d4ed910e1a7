// Translates the run-time format of a quantiser to template arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "dispatch.h"
#include "quantize/quantize.h"
#include "scheduler/ceil_div.h"

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

// The tiles of matrices, a thread block each, or for some that are next to each other. All of them
// are in the first dimension of the grid: the others end at 65535.
struct TileGrid {
  unsigned across;
  unsigned down;

  struct Place {
    int matrix;
    int down;
    int across;
  };

  // Where there are more than a grid has, the launch says so.
  dim3 blocks(int64_t matrices = 1) const {
    return dim3(static_cast<unsigned>(std::min<int64_t>(matrices * down * across, UINT32_MAX)));
  }

  // The place of this thread block.
  __device__ __forceinline__ Place place() const {
    unsigned const row = blockIdx.x / across, matrix = row / down;
    return {static_cast<int>(matrix), static_cast<int>(row - matrix * down),
            static_cast<int>(blockIdx.x - row * across)};
  }
};

}  // namespace jgg::quantize
