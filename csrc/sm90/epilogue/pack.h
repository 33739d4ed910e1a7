// Two 16-bit results in one register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "types.h"

namespace jgg::sm90 {

// Returns `low` in the low half and `high` in the high half. `type` has 16 bits.
__device__ inline uint32_t pack(ElementType type, float low, float high) {
  if (type == ElementType::kBf16) {
    auto const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
  auto const pair = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}

}  // namespace jgg::sm90
