#pragma once

#include <nanobind/nanobind.h>

namespace jgg {

void define_schedules(nanobind::module_& module);

}  // namespace jgg
