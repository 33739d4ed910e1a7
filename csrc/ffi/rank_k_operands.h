// What the bindings of the symmetric updates have in common: stacks from buffers, and what is asked
// of all of them.
#pragma once

#include <optional>
#include <vector>

#include "ffi/buffers.h"
#include "rank_k/rank_k.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// alpha or beta of a stack: a number for each matrix, or one for all.
struct RankKScales {
  void const* values;
  int stride;  // from one matrix's to the next one's
};

// One stack of results and its operands.
struct RankKBuffers {
  void const* a;
  void const* b;  // null in a rank-k update
  void* out;
  ffi::DataType type;
  ffi::DataType out_type;
  RankKScales alpha;
  RankKScales beta;  // alpha, if no c is added
  int matrices;
  int n;
  int k;
};

// Operands: alpha; beta if there is a c; a; b in a rank-2k update; c if it is added or kept. Each
// is a list with one for every result. c and the results are the same memory. Types are those of
// the first stack for all, and `scale_type`, or that of a, for alpha and beta.
ffi::ErrorOr<std::vector<RankKBuffers>> rank_k_buffers(ffi::RemainingArgs const& operands,
                                                       ffi::RemainingRets const& results,
                                                       bool two_operands, bool has_c,
                                                       bool transpose,
                                                       std::optional<ffi::DataType> scale_type);

// What is asked of every stack, in the arguments of either family of kernels.
template <class Arguments>
void set_update(bool has_c, bool transpose, bool upper, bool symmetrize, Arguments& arguments) {
  arguments.uplo = upper ? Uplo::kUpper : Uplo::kLower;
  arguments.other = symmetrize ? OtherTriangle::kMirrored
                    : has_c    ? OtherTriangle::kKept
                               : OtherTriangle::kZero;
  arguments.adds_c = has_c;
  arguments.transpose = transpose;
}

}  // namespace jgg
