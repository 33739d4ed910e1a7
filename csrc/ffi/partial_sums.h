// Checks the workspace of kernels that cut the last wave along K.
#pragma once

#include <string>

#include "ffi/buffers.h"
#include "scheduler/partial_sums.h"
#include "types.h"

namespace jgg {

// Whether it has room for the sums of one cluster at least.
inline ffi::Error sums_fit(int64_t workspace_bytes, TileConfig tile) {
  int64_t const least = tile.cluster * PartialSumsWorkspace::block_bytes(tile.tile_m, tile.tile_n);
  if (workspace_bytes >= least) return ffi::Error::Success();
  return invalid("the workspace has " + std::to_string(workspace_bytes) +
                 " bytes, but partial sums of one cluster take " + std::to_string(least));
}

}  // namespace jgg
