// The sizes of groups, which only the device knows.
#pragma once

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

// Contracting products of groups of at most this many 16-bit rows spend most of their time on
// writing results. Long tiles among the short tiles hide these writes.
constexpr int kFewRows = 128;

inline bool has_few_rows(GroupSizes const& groups) {
  return groups.rows / groups.groups <= kFewRows;
}

}  // namespace jgg
