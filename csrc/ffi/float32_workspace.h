// Accuracy and workspace of float32 operands.
#pragma once

#include <string>

#include "ffi/buffers.h"
#include "ffi/call.h"
#include "types.h"

namespace jgg {

// The accuracy that the attribute `terms` asks for, the number of products of two 16-bit parts.
inline ffi::ErrorOr<Accuracy> accuracy_of(int terms) {
  if (terms == 1) return Accuracy::kTf32;
  if (terms == 3) return Accuracy::kF32;
  return ffi::Unexpected(
      invalid("a product of f32 takes 1 or 3 terms, not " + std::to_string(terms)));
}

inline ffi::Error parts_fit(int64_t workspace_bytes, int64_t needed) {
  if (workspace_bytes >= needed) return ffi::Error::Success();
  return invalid("the workspace has " + std::to_string(workspace_bytes) +
                 " bytes, but the parts of the operands take " + std::to_string(needed));
}

// Takes over `terms` and the workspace. `needed` tells how many bytes the arguments need.
template <class Arguments>
void use_float32_workspace(Call& call, WorkspaceResult workspace,
                           int64_t (*needed)(Arguments const&), Arguments& arguments) {
  arguments.accuracy = call.take(accuracy_of(call.get<int32_t>("terms", 0)));
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  if (!call.failed()) call.check(parts_fit(arguments.workspace_bytes, needed(arguments)));
}

}  // namespace jgg
