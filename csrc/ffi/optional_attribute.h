// What handlers have in common that take one more attribute than XLA knows of.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jgg {

// A call without the attribute `name`: XLA counts those of a handler. `call` has to outlive it.
class WithoutAttribute {
 public:
  WithoutAttribute(XLA_FFI_CallFrame const& call, std::string_view name) : frame_(call) {
    for (int64_t i = 0; i < call.attrs.size; ++i) {
      XLA_FFI_ByteSpan* const other = call.attrs.names[i];
      if (std::string_view(other->ptr, other->len) == name) continue;
      types_.push_back(call.attrs.types[i]);
      names_.push_back(other);
      values_.push_back(call.attrs.attrs[i]);
    }
    frame_.attrs.size = static_cast<int64_t>(types_.size());
    frame_.attrs.types = types_.data();
    frame_.attrs.names = names_.data();
    frame_.attrs.attrs = values_.data();
  }
  WithoutAttribute(WithoutAttribute const&) = delete;

  XLA_FFI_CallFrame& frame() { return frame_; }

 private:
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
  XLA_FFI_CallFrame frame_;
};

inline XLA_FFI_Error* invalid_call(XLA_FFI_CallFrame const& call, std::string const& message) {
  XLA_FFI_Error_Create_Args error{};
  error.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  error.message = message.c_str();
  error.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return call.api->XLA_FFI_Error_Create(&error);
}

}  // namespace jgg
