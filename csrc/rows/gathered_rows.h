// The rows of memory that form an operand.
#pragma once

#include "scheduler/host_device.h"

namespace jgg {

// An operand whose rows are copies of `tokens` rows in memory, in any order and with repeats. Row i
// of the operand is row of[i] / divisor in memory, or zeros if there is no such row. If `of` is
// null, the rows in memory are the operand.
struct GatheredRows {
  int const* of = nullptr;
  int divisor = 1;
  int tokens = 0;

  // Returns the row in memory for `index`, which is an element of `of`, or -1 if `index` is
  // negative.
  JGG_HOST_DEVICE int row(int index) const {
    return index < 0 ? -1 : divisor == 1 ? index : index / divisor;
  }
};

}  // namespace jgg
