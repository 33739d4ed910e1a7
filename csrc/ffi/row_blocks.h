// Checks the number of blocks of 128 rows that a transposed quantisation needs. Each block has rows
// of one group only.
#pragma once

#include <algorithm>
#include <string>

#include "ffi/buffers.h"
#include "types.h"

namespace jgg {

// Whether kernels that contract blocks of rows can count their rows.
inline ffi::Error countable_blocks(int row_blocks) {
  return is_size("the number of rows of all blocks of 128", int64_t(row_blocks) * kScaleBlock);
}

inline ffi::Error enough_blocks(int rows, int group_sizes, int row_blocks) {
  int const groups = std::min(group_sizes, rows);
  // Most are needed where every group but one has a single row.
  int const most = (rows - groups) / kScaleBlock + groups;
  if (row_blocks >= most) return ffi::Error::Success();
  return invalid("values_t has " + std::to_string(row_blocks) + " blocks of rows, but " +
                 std::to_string(most) + " may be needed");
}

}  // namespace jgg
