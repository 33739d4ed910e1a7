// Reads group sizes from buffers.
#pragma once

#include "ffi/buffers.h"
#include "scheduler/group_sizes.h"

namespace jgg {

using Sizes = ffi::Buffer<ffi::S32>;

// Checks the groups of `rows` rows in each of `batches` batches.
inline ffi::ErrorOr<GroupSizes> groups_of(Sizes group_sizes, Sizes group_offset, int batches,
                                          int local_groups, int rows, bool zeroes_unowned = true) {
  for (auto error :
       {is_size("the number of rows of all batches", int64_t(batches) * rows),
        is_size("the number of matrices of all batches", int64_t(batches) * local_groups)}) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  auto const sizes = Shape<1>::of("group_sizes", group_sizes);
  if (!sizes) return ffi::Unexpected(sizes.error());
  auto const offset = Shape<1>::of("group_offset", group_offset);
  if (!offset) return ffi::Unexpected(offset.error());
  int const count = sizes->size[0];
  for (auto error : {sizes->expect({count}, batches), offset->expect({1}, batches)}) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  GroupSizes groups{};
  groups.sizes = group_sizes.typed_data();
  groups.offset = group_offset.typed_data();
  groups.sizes_batch_stride = sizes->batched ? count : 0;
  groups.offset_batch_stride = offset->batched ? 1 : 0;
  groups.batches = batches;
  groups.groups = count;
  groups.local_groups = local_groups;
  groups.rows = rows;
  groups.zeroes_unowned = zeroes_unowned;
  return groups;
}

}  // namespace jgg
