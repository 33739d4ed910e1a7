// Element types of buffers, in the terms of the kernels.
#pragma once

#include "sm90/ragged_dot.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// False if the kernels do not know the type.
inline bool element_type(::xla::ffi::DataType type, sm90::ElementType& result) {
  switch (type) {
    case ::xla::ffi::DataType::BF16:
      result = sm90::ElementType::kBf16;
      return true;
    case ::xla::ffi::DataType::F16:
      result = sm90::ElementType::kF16;
      return true;
    case ::xla::ffi::DataType::F32:
      result = sm90::ElementType::kF32;
      return true;
    default:
      return false;
  }
}

}  // namespace jgg
