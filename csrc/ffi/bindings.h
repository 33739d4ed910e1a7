// What the bindings of handlers have in common.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

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

// The attributes of a TileConfig, but its kind.
template <class Binding>
auto with_tile_attributes(Binding binding) {
  return std::move(binding)
      .template Attr<int32_t>("tile_m")
      .template Attr<int32_t>("tile_n")
      .template Attr<int32_t>("cluster");
}

// Those of an activation, but its function.
template <class Binding>
auto with_activation_attributes(Binding binding) {
  return std::move(binding)
      .template Attr<float>("alpha")
      .template Attr<float>("cubic")
      .template Attr<float>("limit")
      .template Attr<float>("shift");
}

}  // namespace jgg
