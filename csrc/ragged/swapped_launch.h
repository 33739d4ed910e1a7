// From run-time arguments to one compiled kernel for few rows, and its launch.
#pragma once

#include <algorithm>

#include "multiprocessors.h"
#include "ragged/launch.h"
#include "ragged/swapped_noncontracting.h"
#include "ragged/tiles.h"
#include "sm90/swapped_split_kernel.h"

namespace jgg::sm90 {

template <class Problem>
cudaError_t launch_swapped(RaggedDotArguments const& arguments, cudaStream_t stream) {
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
  return launch_clusters<Config, sizeof(SwappedSplitStorage<Config>)>(
      swapped_split_kernel<Problem>, params, std::min<int64_t>(units, multiprocessors),
      kSplitThreads, stream);
}

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
template <ElementType>
cudaError_t noncontracting_swapped(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  using cute::GMMA::Major;
  return with_constants(
      [&](auto, auto, auto transpose_rhs, auto accuracy) {
        constexpr int kParts = accuracy == Accuracy::kF32 ? 3 : 2;
        return launch_swapped<
            SwappedNoncontracting<SwappedSplitConfig<major(Major::MN, transpose_rhs), kParts>>>(
            arguments, stream);
      },
      OneTileOf<Float32SwappedTiles>{config}, OneOf<false>{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs}, OneOf<Accuracy::kTf32, Accuracy::kF32>{arguments.accuracy});
}

}  // namespace jgg::sm90
