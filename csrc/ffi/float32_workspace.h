// The workspace of lists of float32 operands, checked.
#pragma once

#include <string>

#include "ffi/buffers.h"
#include "sm90/f32/terms.h"

namespace jgg {

using WorkspaceResult = ffi::Result<ffi::Buffer<ffi::U8>>;

// Takes over `terms` and the workspace. `needed` tells how many bytes the arguments need.
template <class Arguments>
ffi::Error use_float32_workspace(WorkspaceResult workspace, int terms,
                                 int64_t (*needed)(Arguments const&), Arguments& arguments) {
  if (terms != 1 && terms != sm90::f32::kMostTerms) {
    return invalid("a product of f32 takes 1 or 3 terms, not " + std::to_string(terms));
  }
  arguments.terms = terms;
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  int64_t const bytes = needed(arguments);
  if (arguments.workspace_bytes < bytes) {
    return invalid("the workspace has " + std::to_string(arguments.workspace_bytes) +
                   " bytes, but the parts of the operands take " + std::to_string(bytes));
  }
  return ffi::Error::Success();
}

}  // namespace jgg
