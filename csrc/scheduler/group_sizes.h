// The sizes of groups, which only the device knows.
#pragma once

namespace jgg {

// The part of a ragged dimension of `rows` rows that `sizes` describes. Local group i, the one that
// multiplies rhs[i] or writes out[i], is global group `offset + i`.
struct GroupSizes {
  int const* sizes;        // [batches, groups]
  int const* offset;       // [batches]
  int sizes_batch_stride;  // 0 where one row serves every batch
  int offset_batch_stride;
  int batches;
  int groups;
  int local_groups;
  int rows;
  // Whether rows of a result that no local group owns are zero, or undefined: then nothing of them
  // is read or written.
  bool zeroes_unowned = true;

  // Whether batches differ in which rows their groups own.
  constexpr bool batched() const { return sizes_batch_stride != 0 || offset_batch_stride != 0; }
};

// Groups of at most so many 16-bit rows spend most of their time on writing results, which long
// tiles among them hide.
constexpr int kFewRows = 128;

inline bool has_few_rows(GroupSizes const& groups) {
  return groups.rows / groups.groups <= kFewRows;
}

}  // namespace jgg
