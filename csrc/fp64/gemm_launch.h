// From run-time arguments to one compiled kernel, and its launches.
#pragma once

#include <algorithm>
#include <memory>

#include "fp64/gemm_kernel.h"
#include "fp64/launch_blocks.h"
#include "fp64/tile_table.h"

namespace jgg::fp64 {

// One launch for every kMaxProblems problems.
template <class Config>
cudaError_t launch_gemm(GemmArguments const& arguments, cudaStream_t stream) {
  using List = GemmList<Config>;
  // Too large for the stack of a thread that is not ours.
  auto const params = std::make_unique<typename List::Params>();
  int const count = static_cast<int>(arguments.problems.size());
  for (int first = 0; first < count; first += List::kMaxProblems) {
    List::make_params(arguments, &arguments.problems[first],
                      std::min(count - first, List::kMaxProblems), *params);
    cudaError_t const status =
        launch_blocks<Config>(gemm_kernel<Config>, *params, params->units, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Whether all operands can be copied 16 bytes at a time.
template <class Element>
bool has_wide_units(GemmArguments const& arguments) {
  return std::all_of(arguments.problems.begin(), arguments.problems.end(),
                     [&](GemmProblem const& problem) {
                       return has_wide_units<Element>(
                                  problem.lhs, arguments.lhs_transposed ? problem.m : problem.k) &&
                              has_wide_units<Element>(
                                  problem.rhs, arguments.rhs_transposed ? problem.k : problem.n);
                     });
}

template <class Shape, bool kLhsTransposed, bool kRhsTransposed>
cudaError_t launch_any_unit(GemmArguments const& arguments, cudaStream_t stream) {
  using Element = typename Shape::Element;
  // To the mainloop both operands are panels of rows: the plain rhs [k, n] is a transposed one.
  if constexpr (sizeof(Element) < 16) {
    if (!has_wide_units<Element>(arguments)) {
      return launch_gemm<KernelConfig<Shape, kLhsTransposed, !kRhsTransposed, 8>>(arguments,
                                                                                  stream);
    }
  }
  return launch_gemm<KernelConfig<Shape, kLhsTransposed, !kRhsTransposed, 16>>(arguments, stream);
}

template <class Shape>
cudaError_t launch_any_order(GemmArguments const& arguments, cudaStream_t stream) {
  if (arguments.lhs_transposed) {
    return arguments.rhs_transposed ? launch_any_unit<Shape, true, true>(arguments, stream)
                                    : launch_any_unit<Shape, true, false>(arguments, stream);
  }
  return arguments.rhs_transposed ? launch_any_unit<Shape, false, true>(arguments, stream)
                                  : launch_any_unit<Shape, false, false>(arguments, stream);
}

template <class... Shapes>
cudaError_t launch_any_gemm(ShapeList<Shapes...>, TileConfig config, GemmArguments const& arguments,
                            cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidConfiguration;
  auto const launch_if_asked_for = [&](auto shape) {
    using Shape = decltype(shape);
    if (config.tile_m == Shape::kTile && config.tile_n == Shape::kTile && config.cluster == 1) {
      status = launch_any_order<Shape>(arguments, stream);
    }
  };
  (launch_if_asked_for(Shapes{}), ...);
  return status;
}

}  // namespace jgg::fp64
