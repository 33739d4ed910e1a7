// From run-time arguments to the passes and the kernel of a product of float32 operands.
#pragma once

#include "ragged/launch.h"
#include "ragged/parts.h"
#include "ragged/parts_prepare.h"
#include "ragged/tiles.h"
#include "sm90/mainloop/parts.h"

namespace jgg::sm90 {

// `Problem` is the family; the majors are those of operands that are not transposed.
template <template <class> class Problem, cute::GMMA::Major kLhsMajor, cute::GMMA::Major kRhsMajor>
cudaError_t launch_parts(TileConfig config, RaggedDotArguments const& arguments,
                         cudaStream_t stream) {
  RaggedWorkspace const workspace(arguments);
  if (workspace.bytes() > arguments.workspace_bytes) return cudaErrorInvalidValue;
  cudaError_t const status = prepare(arguments, workspace, stream);
  if (status != cudaSuccess) return status;
  return with_constants(
      [&](auto tile, auto transpose_lhs, auto transpose_rhs) {
        using Config = ConfigOf<decltype(tile), cutlass::half_t, float,
                                major(kLhsMajor, transpose_lhs), major(kRhsMajor, transpose_rhs)>;
        using Parts = RaggedParts<Problem<Config>>;
        return launch_tiles<Parts, PartsMainloop<Parts>>(arguments, stream);
      },
      OneTileOf<Float32Tiles>{config}, Flag{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs});
}

}  // namespace jgg::sm90
