// Code that the handlers of symmetric updates share: stacks from buffers, and the attributes of all
// stacks.
#pragma once

#include <optional>
#include <vector>

#include "ffi/call.h"
#include "rank_k/rank_k.h"

namespace jgg {

// alpha, beta or diagonal of a stack: one number for each matrix, or one number for all.
struct RankKScales {
  void const* values;
  int stride;  // from a matrix's number to the next matrix's, 0 if all share one
};

// One stack of results and its operands.
struct RankKBuffers {
  void const* a;
  void const* b;  // null in a rank-k update
  void* out;
  void const* c;  // `out`, if no c is added
  ffi::DataType type;
  ffi::DataType out_type;
  RankKScales alpha;
  RankKScales beta;      // alpha, if no c is added
  RankKScales diagonal;  // alpha, if there is no diagonal
  int matrices;
  int n;
  int k;
};

// The operands that are given, and how they are stored.
struct RankKForm {
  bool two_operands;
  bool has_c;
  bool transpose;
  bool has_diagonal = false;
  bool updates_c = true;  // whether c and the result are the same memory
};

// Reads the attributes that all stacks share into RankKArguments or fp64::RankKArguments.
template <class Arguments>
RankKForm form_of(Call& call, Arguments& arguments) {
  RankKForm const form{call.get<bool>("two_operands"), call.get<bool>("has_c"),
                       call.get<bool>("transpose")};
  arguments.uplo = call.get<bool>("upper") ? Uplo::kUpper : Uplo::kLower;
  arguments.other = call.get<bool>("symmetrize") ? OtherTriangle::kMirrored
                    : form.has_c                 ? OtherTriangle::kKept
                                                 : OtherTriangle::kZero;
  arguments.adds_c = form.has_c;
  arguments.transpose = form.transpose;
  return form;
}

// Returns the buffers of each stack, or nothing if the call has failed. The operands are alpha,
// beta (if there is a c), the diagonal (if there is one), a, b (if there are two operands) and c
// (if it is added or kept). Each of these is a list with one operand for every result. All stacks
// have the types of the first stack. Scales have `scale_type` or, without it, the type of a.
std::vector<RankKBuffers> rank_k_buffers(Call& call, ffi::RemainingArgs const& operands,
                                         ffi::RemainingRets const& results, RankKForm form,
                                         std::optional<ffi::DataType> scale_type);

}  // namespace jgg
