// Selects the compiled stream-K kernel by the run-time arguments, and launches it.
#pragma once

#include <algorithm>

#include "ragged/cut_noncontracting.h"
#include "ragged/launch.h"
#include "ragged/tiles.h"
#include "sm90/piece_roles.h"

namespace jgg::sm90 {

template <class Problem>
cudaError_t launch_pieces(RaggedDotArguments const& arguments, cudaStream_t stream) {
  typename Problem::Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  int64_t const clusters = std::min(Assignment::kClustersAUnit * Problem::max_units(arguments),
                                    max_clusters<typename Problem::Config>(params.workspace));
  return launch_persistent<PieceRoles<Problem, CooperativeMainloop<Problem>>>(
      params, clusters, arguments.max_sms, stream);
}

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
template <ElementType kType>
cudaError_t noncontracting_stream_k(TileConfig config, RaggedDotArguments const& arguments,
                                    cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto, auto transpose_rhs, auto out_type) {
        using Config = ConfigOf<decltype(tile), Typed<kType>, Typed<out_type>, Major::kK,
                                major(Major::kMN, transpose_rhs)>;
        return launch_pieces<CutNoncontracting<Config>>(arguments, stream);
      },
      OneTileOf<StreamKTiles>{config}, OneOf<false>{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs}, OneOf<kType, ElementType::kF32>{arguments.out_type});
}

}  // namespace jgg::sm90
