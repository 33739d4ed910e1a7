// Reads group sizes from buffers.
#pragma once

#include "ffi/call.h"
#include "scheduler/group_sizes.h"

namespace jgg {

using Sizes = ffi::Buffer<ffi::S32>;

// Returns the groups of `rows` rows in each of `batches` batches.
inline GroupSizes groups_of(Call& call, Sizes group_sizes, Sizes group_offset, int batches,
                            int local_groups, int rows, bool zeroes_unowned = true) {
  call.expect_size("the number of rows of all batches", int64_t(batches) * rows);
  call.expect_size("the number of matrices of all batches", int64_t(batches) * local_groups);
  auto const sizes = call.shape<1>("group_sizes", group_sizes);
  auto const offset = call.shape<1>("group_offset", group_offset);
  int const count = sizes.size[0];
  call.expect(sizes, {count}, batches);
  call.expect(offset, {1}, batches);
  GroupSizes groups{};
  groups.sizes = group_sizes.typed_data();
  groups.offset = group_offset.typed_data();
  groups.sizes_batch_stride = sizes.batched ? count : 0;
  groups.offset_batch_stride = offset.batched ? 1 : 0;
  groups.batches = batches;
  groups.groups = count;
  groups.local_groups = local_groups;
  groups.rows = rows;
  groups.zeroes_unowned = zeroes_unowned;
  return groups;
}

}  // namespace jgg
