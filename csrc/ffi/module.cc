// The Python module jax_grouped_gemm._extension: hands the XLA FFI handlers to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "ffi/bindings.h"

namespace jgg {
namespace {

namespace nb = nanobind;

nb::dict registrations() {
  nb::dict targets;
  for (auto const& [target, handler] : handlers()) {
    targets[target.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
  }
  return targets;
}

// If handlers were compiled with newer headers than XLA's own, XLA refuses them, and no backend
// initialises. So Python compares versions first, and its error says what is wrong.
std::pair<int, int> ffi_api_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace
}  // namespace jgg

NB_MODULE(_extension, module) {
  module.def("registrations", &jgg::registrations);
  module.def("ffi_api_version", &jgg::ffi_api_version);
}
