// The sizes of groups, which only the device knows.
#pragma once

#include "scheduler/host_device.h"
#include "scheduler/warp.h"

namespace jgg {

// The part of a ragged dimension of `rows` rows that `sizes` describes. Local group i multiplies
// rhs[i] or writes out[i], and is global group `offset + i`.
struct GroupSizes {
  int const* sizes;        // [batches, groups]
  int const* offset;       // [batches]
  int sizes_batch_stride;  // 0 if all batches share the sizes
  int offset_batch_stride;
  int batches;
  int groups;
  int local_groups;
  int rows;
  // Whether unowned rows of a result become zero. Otherwise they are undefined, and neither read
  // nor written.
  bool zeroes_unowned = true;

  // Whether batches differ in which rows their groups own.
  constexpr bool batched() const { return sizes_batch_stride != 0 || offset_batch_stride != 0; }
};

// Calls function(rows) for each local group that lane `lane` of a warp looks at, one in kWarpSize.
// Each size is cut to `rows`, but counts even if earlier groups have used up all rows, so the sum
// of the sizes may be larger.
template <class Function>
JGG_HOST_DEVICE void for_each_local_size(GroupSizes const& groups, int lane, Function function) {
  for (int batch = 0; batch < groups.batches; ++batch) {
    int const* const sizes =
        groups.sizes + static_cast<long long>(batch) * groups.sizes_batch_stride;
    long long const offset = groups.offset[batch * groups.offset_batch_stride];
    for (int local = lane; local < groups.local_groups; local += kWarpSize) {
      long long const group = offset + local;
      int const size = group < 0 || group >= groups.groups ? 0 : sizes[group];
      function(size < 0 ? 0 : size < groups.rows ? size : groups.rows);
    }
  }
}

// Contracting products of groups of at most this many 16-bit rows spend most of their time on
// writing results. Long tiles among the short tiles hide these writes.
constexpr int kFewRows = 128;

inline bool has_few_rows(GroupSizes const& groups) {
  return groups.rows / groups.groups <= kFewRows;
}

}  // namespace jgg
