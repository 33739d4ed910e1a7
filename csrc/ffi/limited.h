// Handlers that can be asked to leave part of the chip to others.
#pragma once

#include <cstdint>

#include "ffi/optional_attribute.h"
#include "multiprocessors.h"

namespace jgg {

// `kHandler` with one more attribute that a call may have, the int32 `max_sms`: the most
// multiprocessors that its kernels fill.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* limited(XLA_FFI_CallFrame* frame) {
  constexpr char const* kName = "max_sms";
  xla::ffi::Dictionary const given(&frame->attrs);
  if (!given.contains(kName)) return kHandler(frame);
  auto const most = given.get<int32_t>(kName);
  if (!most || *most < 1) return invalid_call(*frame, "max_sms has to be a positive int32");

  WithoutAttribute others(*frame, kName);
  MultiprocessorLimit const limit(*most);
  XLA_FFI_Error* const error = kHandler(&others.frame());
  frame->future = others.frame().future;
  return error;
}

}  // namespace jgg
