// Selects the compiled kernel for few rows by the run-time arguments, and launches it.
#pragma once

#include "ragged/swapped_noncontracting.h"
#include "ragged/tiles.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/swapped_split_roles.h"

namespace jgg::sm90 {

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N, or along K with `transpose_rhs`.
template <ElementType>
cudaError_t noncontracting_swapped(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  return with_constants(
      [&](auto, auto, auto transpose_rhs, auto accuracy) {
        constexpr int kParts = accuracy == Accuracy::kF32 ? 3 : 2;
        using Config = SwappedSplitConfig<major(Major::kMN, transpose_rhs), kParts>;
        return launch<SwappedSplitRoles<SwappedNoncontracting<Config>>>(arguments, stream);
      },
      OneTileOf<Float32SwappedTiles>{config}, OneOf<false>{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs}, OneOf<Accuracy::kTf32, Accuracy::kF32>{arguments.accuracy});
}

}  // namespace jgg::sm90
