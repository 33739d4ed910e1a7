// What the bindings of the symmetric updates have in common: stacks of matrices from buffers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// One stack of results and its operands.
struct RankKBuffers {
  void const* a;
  void const* b;  // null in a rank-k update
  void* out;
  ffi::DataType type;
  ffi::DataType out_type;
  int matrices;
  int n;
  int k;
  int first_matrix;  // matrices of the stacks before this one
};

// Operands from number `first` on: a, then b in a rank-2k update, then c if it is added or kept,
// each a stack for every result. c and the results are the same memory. Types are those of the
// first stack for all.
ffi::ErrorOr<std::vector<RankKBuffers>> rank_k_buffers(ffi::RemainingArgs const& operands,
                                                       ffi::RemainingRets const& results,
                                                       bool two_operands, bool has_c,
                                                       bool transpose, size_t first = 0);

// How many elements alpha and beta have: one for each matrix of all stacks.
size_t num_matrices(std::vector<RankKBuffers> const& stacks);

}  // namespace jgg
