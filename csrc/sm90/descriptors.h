// Descriptors of the operands of WGMMA in shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "scheduler/warp.h"

namespace jgg::sm90 {

// The same descriptors, which are those of a whole warpgroup, in uniform registers: what is left to
// do between a wait for a stage and its first WGMMA is an addition.
template <class Descriptors>
__device__ auto in_uniform_registers(Descriptors const& descriptors) {
  auto first = descriptors.data();
  first.desc_.reg32_[0] = uniform(first.desc_.reg32_[0]);
  return cute::make_tensor(first, descriptors.layout());
}

// Descriptors of what lies so many bytes further on, in another stage.
template <class Descriptors>
__device__ auto advance(Descriptors const& descriptors, int bytes) {
  constexpr int kUnit = 16;  // of addresses in descriptors
  return cute::make_tensor(descriptors.data() + bytes / kUnit, descriptors.layout());
}

}  // namespace jgg::sm90
