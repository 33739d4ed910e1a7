// Handlers that can be asked to leave part of the chip to others.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "multiprocessors.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// `kHandler` with one more attribute that a call may have, the int32 `max_sms`: the most
// multiprocessors that its kernels fill. XLA counts the attributes of a handler, so that it gets
// those without it.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* limited(XLA_FFI_CallFrame* frame) {
  constexpr std::string_view kName = "max_sms";
  xla::ffi::Dictionary const given(&frame->attrs);
  if (!given.contains(kName)) return kHandler(frame);
  auto const most = given.get<int32_t>(kName);
  if (!most || *most < 1) {
    XLA_FFI_Error_Create_Args error{};
    error.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    error.message = "max_sms has to be a positive int32";
    error.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
    return frame->api->XLA_FFI_Error_Create(&error);
  }

  std::vector<XLA_FFI_AttrType> types;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
  for (int64_t i = 0; i < frame->attrs.size; ++i) {
    XLA_FFI_ByteSpan* const name = frame->attrs.names[i];
    if (std::string_view(name->ptr, name->len) == kName) continue;
    types.push_back(frame->attrs.types[i]);
    names.push_back(name);
    values.push_back(frame->attrs.attrs[i]);
  }
  XLA_FFI_CallFrame others = *frame;
  others.attrs.size = static_cast<int64_t>(types.size());
  others.attrs.types = types.data();
  others.attrs.names = names.data();
  others.attrs.attrs = values.data();
  MultiprocessorLimit const limit(*most);
  XLA_FFI_Error* const error = kHandler(&others);
  frame->future = others.future;
  return error;
}

}  // namespace jgg
