// From run-time arguments to one compiled kernel of a contracting product, and its launch.
#pragma once

#include "sm90/launch.h"
#include "sm90/skew/kernel.h"
#include "sm90/skew/problem.h"

namespace jgg::sm90::skew {

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along what is kept.
template <class Element>
cudaError_t launch_any(TileConfig config, RaggedDotArguments const& arguments,
                       cudaStream_t stream) {
  using cute::GMMA::Major;
  return with_config<Element, Major::MN, Major::MN>(config, arguments, [&](auto of) {
    using Config = decltype(of);
    using Whole = sm90::RaggedContracting<Config>;
    if constexpr (!Whole::kMasksRows) {
      using Problem = RaggedContracting<Config>;
      if (Problem::can_be_skewed(arguments)) {
        typename Problem::Params params;
        cudaError_t const status = Problem::make_params(arguments, params);
        if (status != cudaSuccess) return status;
        // However few tiles there are, all clusters can have pieces of them.
        return launch_persistent<Config>(contracting_kernel<Problem, Mainloop<Whole>>, params,
                                         kMaxClusters<Config>, stream);
      }
    }
    return launch<Whole>(arguments, stream);
  });
}

}  // namespace jgg::sm90::skew
