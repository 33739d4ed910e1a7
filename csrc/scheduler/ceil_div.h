#pragma once

#include "scheduler/host_device.h"

namespace jgg {

JGG_HOST_DEVICE int ceil_div(int a, int b) { return a / b + (a % b != 0); }

}  // namespace jgg
