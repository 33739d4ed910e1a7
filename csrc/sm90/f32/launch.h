// From run-time arguments to the passes and the kernel of a product of float32 operands.
#pragma once

#include "sm90/f32/mainloop.h"
#include "sm90/f32/prepare.h"
#include "sm90/f32/segments.h"
#include "sm90/launch.h"

namespace jgg::sm90::f32 {

// `Problem` is the family; the majors are those of operands that are not transposed.
template <template <class> class Problem, cute::GMMA::Major kLhsMajor, cute::GMMA::Major kRhsMajor>
cudaError_t launch_any(TileConfig config, RaggedDotArguments const& arguments,
                       cudaStream_t stream) {
  Workspace const workspace(arguments);
  if (workspace.bytes() > arguments.workspace_bytes) return cudaErrorInvalidValue;
  cudaError_t const status = prepare(arguments, workspace, stream);
  if (status != cudaSuccess) return status;
  return with_tile(Float32Tiles{}, config, [&](auto tile) {
    return with_bool(arguments.transpose_lhs, [&](auto transpose_lhs) {
      return with_bool(arguments.transpose_rhs, [&](auto transpose_rhs) {
        using Tile = decltype(tile);
        using Config = KernelConfig<cutlass::half_t, float, major(kLhsMajor, transpose_lhs.value),
                                    major(kRhsMajor, transpose_rhs.value), Tile::kTileM,
                                    Tile::kTileN, Tile::kCluster>;
        using Parts = Segments<Problem<Config>>;
        return launch<Parts, Mainloop<Parts>>(arguments, stream);
      });
    });
  });
}

}  // namespace jgg::sm90::f32
