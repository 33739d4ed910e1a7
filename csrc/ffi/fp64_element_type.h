// The element types of the kernels on the FP64 tensor cores.
#pragma once

#include "ffi/buffers.h"
#include "fp64/element_type.h"

namespace jgg {

// False if the kernels have no such type.
inline bool element_type(ffi::DataType type, fp64::ElementType& result) {
  switch (type) {
    case ffi::F64:
      result = fp64::ElementType::kF64;
      return true;
    case ffi::C64:
      result = fp64::ElementType::kC64;
      return true;
    case ffi::C128:
      result = fp64::ElementType::kC128;
      return true;
    default:
      return false;
  }
}

}  // namespace jgg
