// The Python module jax_grouped_gemm._schedules runs on the host what kernels run on the device.
#pragma once

#include <nanobind/nanobind.h>

namespace jgg {

namespace nb = nanobind;

void define_layouts(nb::module_& module);
void define_piece_schedules(nb::module_& module);
void define_schedules(nb::module_& module);

}  // namespace jgg
