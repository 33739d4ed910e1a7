// From run-time arguments to one compiled kernel for few rows, and its launch.
#pragma once

#include <algorithm>

#include "multiprocessors.h"
#include "sm90/cluster_launch.h"
#include "sm90/f32/few_rows/kernel.h"
#include "sm90/launch.h"

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

// lhs [m, k] is contiguous along K.
inline cudaError_t launch_any(TileConfig config, RaggedDotArguments const& arguments,
                              cudaStream_t stream) {
  if (arguments.transpose_lhs) return cudaErrorInvalidConfiguration;
  return with_tile(Float32FewRowsTiles{}, config, [&](auto) {
    return with_bool(arguments.transpose_rhs, [&](auto along_k) {
      constexpr auto kMajor = along_k.value ? cute::GMMA::Major::K : cute::GMMA::Major::MN;
      return with_bool(arguments.accuracy == Accuracy::kF32, [&](auto exact) {
        return launch<Noncontracting<Config<kMajor, exact.value ? 3 : 2>>>(arguments, stream);
      });
    });
  });
}

}  // namespace jgg::sm90::f32::few_rows
