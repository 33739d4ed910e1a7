// From run-time arguments to the passes and the kernel of a product of float32 operands.
#pragma once

#include "sm90/f32/mainloop.h"
#include "sm90/f32/prepare.h"
#include "sm90/f32/segments.h"
#include "sm90/launch.h"
#include "sm90/tiles.h"

namespace jgg::sm90 {

// `Problem` is the family; the majors are those of operands that are not transposed.
template <template <class> class Problem, cute::GMMA::Major kLhsMajor, cute::GMMA::Major kRhsMajor>
cudaError_t launch_parts(TileConfig config, RaggedDotArguments const& arguments,
                         cudaStream_t stream) {
  f32::Workspace const workspace(arguments);
  if (workspace.bytes() > arguments.workspace_bytes) return cudaErrorInvalidValue;
  cudaError_t const status = f32::prepare(arguments, workspace, stream);
  if (status != cudaSuccess) return status;
  return with_constants(
      [&](auto tile, auto transpose_lhs, auto transpose_rhs) {
        using Config = ConfigOf<decltype(tile), cutlass::half_t, float,
                                major(kLhsMajor, transpose_lhs), major(kRhsMajor, transpose_rhs)>;
        using Parts = f32::Segments<Problem<Config>>;
        return launch<Parts, f32::Mainloop<Parts>>(arguments, stream);
      },
      OneTileOf<Float32Tiles>{config}, Flag{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs});
}

}  // namespace jgg::sm90
