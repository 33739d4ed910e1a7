// The rows of memory that form an operand.
#pragma once

#include "scheduler/host_device.h"

namespace jgg {

// An operand whose rows are `tokens` others in any order, with repeats: row i of it is row
// of[i] / divisor of what it points to, and zero if that is out of range. Null if the rows are
// there.
struct GatheredRows {
  int const* of = nullptr;
  int divisor = 1;
  int tokens = 0;

  // The row of memory that `index` stands for, -1 if none does.
  JGG_HOST_DEVICE int row(int index) const {
    return index < 0 ? -1 : divisor == 1 ? index : index / divisor;
  }
};

}  // namespace jgg
