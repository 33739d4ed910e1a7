// Checks the number of blocks of 128 rows that a transposed quantisation needs. Each block has rows
// of one group only.
#pragma once

#include <algorithm>
#include <string>

#include "ffi/call.h"
#include "types.h"

namespace jgg {

inline void expect_enough_blocks(Call& call, int rows, int group_sizes, int row_blocks) {
  int const groups = std::min(group_sizes, rows);
  // The most blocks are needed if every group except one has a single row.
  int const most = (rows - groups) / kScaleBlock + groups;
  if (row_blocks >= most) return;
  call.fail("values_t has " + std::to_string(row_blocks) + " blocks of rows, but " +
            std::to_string(most) + " may be needed");
}

}  // namespace jgg
