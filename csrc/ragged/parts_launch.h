// Launches products of float32 operands: splits the operands, then multiplies their parts.
#pragma once

#include "ragged/contracting.h"
#include "ragged/launch.h"
#include "ragged/noncontracting.h"
#include "ragged/parts.h"
#include "ragged/tiles.h"
#include "sm90/mainloop/parts.h"

namespace jgg::sm90 {

// `Problem` is the template of the problem. `kLhsMajor` is the major of lhs, which is never
// transposed. `TransposesRhs` has the values that `transpose_rhs` may have.
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

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
template <ElementType>
cudaError_t noncontracting_parts(TileConfig config, RaggedDotArguments const& arguments,
                                 cudaStream_t stream) {
  return launch_parts<RaggedNoncontracting, Major::kK, Flag>(config, arguments, stream);
}

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along the dimension that is
// kept.
template <ElementType>
cudaError_t contracting_parts(TileConfig config, RaggedDotArguments const& arguments,
                              cudaStream_t stream) {
  if (arguments.accumulate) return kNotCompiled;
  return launch_parts<RaggedContracting, Major::kMN, OneOf<false>>(config, arguments, stream);
}

}  // namespace jgg::sm90
