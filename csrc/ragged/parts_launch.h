// Launches the passes and the kernel of a product of float32 operands.
#pragma once

#include "ragged/launch.h"
#include "ragged/parts.h"
#include "ragged/parts_prepare.h"
#include "ragged/tiles.h"
#include "sm90/mainloop/parts.h"

namespace jgg::sm90 {

// `Problem` is the family, `kLhsMajor` that of lhs, which is not transposed, and `TransposesRhs`
// the choices of how rhs is stored.
template <template <class> class Problem, Major kLhsMajor, class TransposesRhs>
cudaError_t launch_parts(TileConfig config, RaggedDotArguments const& arguments,
                         cudaStream_t stream) {
  RaggedWorkspace const workspace(arguments);
  if (workspace.bytes() > arguments.workspace_bytes) return cudaErrorInvalidValue;
  cudaError_t const status = prepare(arguments, workspace, stream);
  if (status != cudaSuccess) return status;
  return with_constants(
      [&](auto tile, auto, auto transpose_rhs) {
        using Config = ConfigOf<decltype(tile), cutlass::half_t, float, kLhsMajor,
                                major(Major::kMN, transpose_rhs)>;
        using Parts = RaggedParts<Problem<Config>>;
        return launch_tiles<Parts, PartsMainloop<Parts>>(arguments, stream);
      },
      OneTileOf<Float32Tiles>{config}, OneOf<false>{arguments.transpose_lhs},
      TransposesRhs{arguments.transpose_rhs});
}

}  // namespace jgg::sm90
