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
};

// Operands from number `first` on: a, then b in a rank-2k update, then c if it is added or kept,
// each a stack for every result. c and the results are the same memory. Types are those of the
// first stack for all.
ffi::ErrorOr<std::vector<RankKBuffers>> rank_k_buffers(ffi::RemainingArgs const& operands,
                                                       ffi::RemainingRets const& results,
                                                       bool two_operands, bool has_c,
                                                       bool transpose, size_t first);

// alpha or beta of a stack: a number for each matrix, or one for all.
struct RankKScales {
  void const* values;
  int stride;  // from one matrix's to the next one's

  // Operand number `index`, which has to be of `type`, for a stack of `matrices`.
  static ffi::ErrorOr<RankKScales> of(ffi::RemainingArgs const& operands, size_t index,
                                      ffi::DataType type, int matrices);
};

}  // namespace jgg
