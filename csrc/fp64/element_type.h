// The element types of the FP64 tensor cores' kernels.
#pragma once

namespace jgg::fp64 {

enum class ElementType { kF64, kC64, kC128 };

}  // namespace jgg::fp64
