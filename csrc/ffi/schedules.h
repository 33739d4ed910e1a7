#pragma once

#include <nanobind/nanobind.h>

namespace jgg {

void define_schedules(nanobind::module_& module);
void define_piece_schedules(nanobind::module_& module);

}  // namespace jgg
