// The workspace of a call, and the accuracy on which its size depends.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/call.h"
#include "scheduler/partial_sums.h"
#include "types.h"

namespace jgg {

using WorkspaceResult = ffi::Result<ffi::Buffer<ffi::U8>>;

template <class Arguments>
void set_workspace(WorkspaceResult workspace, Arguments& arguments) {
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
}

inline void expect_room(Call& call, int64_t workspace_bytes, int64_t needed, char const* of_what) {
  if (workspace_bytes >= needed) return;
  call.fail("the workspace has " + std::to_string(workspace_bytes) + " bytes, but " + of_what +
            " take " + std::to_string(needed));
}

// Fails the call unless the workspace holds the partial sums of at least one cluster. Kernels that
// cut the last wave along K need them.
inline void expect_room_for_sums(Call& call, int64_t workspace_bytes, TileConfig tile) {
  int64_t const least = tile.cluster * PartialSumsWorkspace::block_bytes(tile.tile_m, tile.tile_n);
  expect_room(call, workspace_bytes, least, "partial sums of one cluster");
}
inline void expect_room_for_parts(Call& call, int64_t workspace_bytes, int64_t needed) {
  expect_room(call, workspace_bytes, needed, "the parts of the operands");
}

// Returns the accuracy for `terms`, the number of products of 16-bit parts that replace one product
// of float32.
inline Accuracy accuracy_of(Call& call, int terms) {
  if (terms != 1 && terms != 3) {
    call.fail("a product of f32 takes 1 or 3 terms, not " + std::to_string(terms));
  }
  return terms == 1 ? Accuracy::kTf32 : Accuracy::kF32;
}

// Sets the accuracy and the workspace of `arguments`. `needed` returns how many bytes of workspace
// they need.
template <class Arguments>
void use_float32_workspace(Call& call, WorkspaceResult workspace,
                           int64_t (*needed)(Arguments const&), Arguments& arguments) {
  arguments.accuracy = accuracy_of(call, call.get<int32_t>("terms", 0));
  set_workspace(workspace, arguments);
  if (call.failed()) return;
  expect_room_for_parts(call, arguments.workspace_bytes, needed(arguments));
}

}  // namespace jgg
