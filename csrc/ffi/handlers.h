// The XLA FFI handlers of the extension.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JggRaggedNoncontracting(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JggRaggedContracting(XLA_FFI_CallFrame* call_frame);
}
