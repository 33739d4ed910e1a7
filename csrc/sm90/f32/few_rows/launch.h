// From run-time arguments to one compiled kernel for few rows, and its launch.
#pragma once

#include <algorithm>

#include "multiprocessors.h"
#include "sm90/cluster_launch.h"
#include "sm90/f32/few_rows/kernel.h"
#include "sm90/launch.h"
#include "sm90/tiles.h"

namespace jgg::sm90::f32::few_rows {

template <class Problem>
cudaError_t launch(RaggedDotArguments const& arguments, cudaStream_t stream) {
  typename Problem::Params params;
  if (auto const status = Problem::make_params(arguments, params); status != cudaSuccess) {
    return status;
  }
  int multiprocessors;
  if (auto const status = count_multiprocessors(multiprocessors); status != cudaSuccess) {
    return status;
  }
  int64_t const units = std::max<int64_t>(Problem::max_units(arguments), 1);
  using Config = typename Problem::Config;
  return launch_clusters<Config, sizeof(SharedStorage<Config>)>(
      few_rows_kernel<Problem>, params, std::min<int64_t>(units, multiprocessors), kThreads,
      stream);
}

}  // namespace jgg::sm90::f32::few_rows

namespace jgg::sm90 {

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
template <ElementType>
cudaError_t noncontracting_swapped(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  using namespace f32::few_rows;
  using cute::GMMA::Major;
  return with_constants(
      [&](auto, auto, auto transpose_rhs, auto accuracy) {
        constexpr int kParts = accuracy == Accuracy::kF32 ? 3 : 2;
        return f32::few_rows::launch<
            Noncontracting<Config<major(Major::MN, transpose_rhs), kParts>>>(arguments, stream);
      },
      OneTileOf<Float32SwappedTiles>{config}, OneOf<false>{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs}, OneOf<Accuracy::kTf32, Accuracy::kF32>{arguments.accuracy});
}

}  // namespace jgg::sm90
