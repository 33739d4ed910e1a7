// Helpers that define XLA FFI handlers.
#pragma once

#include <cuda_runtime.h>

#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

// Defines a handler by a function and its binding. Graphs that XLA captures may have any of them.
#define JGG_DEFINE_HANDLER(name, function, ...)              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, __VA_ARGS__, \
                                {xla::ffi::Traits::kCmdBufferCompatible})

namespace jgg {

inline auto on_stream() {
  return xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>();
}

}  // namespace jgg
