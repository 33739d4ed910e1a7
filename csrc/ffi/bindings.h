// Makes functions the handlers of XLA's custom calls. The parameters of a function are the
// operands, results and attributes of a call, in the order of the call.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jgg {

namespace ffi = ::xla::ffi;

// Returns the handlers of the extension by the names of their targets. A name includes the version
// of operands and attributes, so that an exported program never calls a handler that reads them
// differently.
inline std::map<std::string, XLA_FFI_Handler*>& handlers() {
  static std::map<std::string, XLA_FFI_Handler*> of_targets;
  return of_targets;
}

// Adds a parameter of this type to a binding.
template <class Parameter, class Binding>
auto bind(Binding&& binding) {
  using Operand = typename ffi::ArgBinding<Parameter>::Arg;
  using Result = typename ffi::RetBinding<Parameter>::Ret;
  if constexpr (std::is_same_v<Parameter, cudaStream_t>) {
    return std::move(binding).template Ctx<ffi::PlatformStream<cudaStream_t>>();
  } else if constexpr (std::is_same_v<Parameter, ffi::RemainingArgs>) {
    return std::move(binding).RemainingArgs();
  } else if constexpr (std::is_same_v<Parameter, ffi::RemainingRets>) {
    return std::move(binding).RemainingRets();
  } else if constexpr (std::is_same_v<Parameter, ffi::Dictionary>) {
    return std::move(binding).Attrs();
  } else if constexpr (!std::is_void_v<Result>) {
    return std::move(binding).template Ret<Result>();
  } else {
    return std::move(binding).template Arg<Operand>();
  }
}

template <class Function, class Binding>
auto bind_all(Function function, Binding&& binding) {
  return binding.To(function, {ffi::Traits::kCmdBufferCompatible});
}
template <class Parameter, class... Parameters, class Function, class Binding>
auto bind_all(Function function, Binding&& binding) {
  return bind_all<Parameters...>(function, bind<Parameter>(std::move(binding)));
}

// Makes `kFunction` the handler of a target. XLA may capture any handler in a CUDA graph.
template <auto kFunction>
class Handler {
 public:
  explicit Handler(char const* target) {
    handlers()[std::string("jax_grouped_gemm.") + target] = &call;
  }

 private:
  template <class... Parameters>
  static auto bound(ffi::Error (*function)(Parameters...)) {
    return bind_all<Parameters...>(function, ffi::Ffi::Bind());
  }

  static XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
    static auto* const handler = bound(kFunction).release();
    return handler->Call(frame);
  }
};

}  // namespace jgg
