// Selects the compiled kernel by the run-time arguments, and launches it.
#pragma once

#include <algorithm>
#include <memory>

#include "dispatch.h"
#include "fp64/gemm_kernel.h"
#include "fp64/launch_blocks.h"
#include "fp64/tile_table.h"

namespace jgg::fp64 {

// Launches a kernel for every kMaxProblems problems.
template <class Config>
cudaError_t launch_gemm(GemmArguments const& arguments, cudaStream_t stream) {
  using List = GemmList<Config>;
  // Parameters are on the heap, because the stack of XLA's thread may be too small for them.
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

// Returns whether all operands can be copied 16 bytes at a time.
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

template <ElementType kType>
cudaError_t fp64_gemm(TileConfig config, GemmArguments const& arguments, cudaStream_t stream) {
  return with_constants(
      [&](auto shape, auto lhs_transposed, auto rhs_transposed, auto wide) {
        using Shape = decltype(shape);
        // A copy is at least one element, and complex128 elements have 16 bytes.
        constexpr int kUnitBytes = wide || sizeof(typename Shape::Element) == 16 ? 16 : 8;
        // The mainloop reads both operands as panels of rows, so a plain rhs [k, n] counts as
        // transposed.
        return launch_gemm<KernelConfig<Shape, lhs_transposed, !rhs_transposed, kUnitBytes>>(
            arguments, stream);
      },
      OneTileOf<typename TilesOf<kType>::Table>{config}, Flag{arguments.lhs_transposed},
      Flag{arguments.rhs_transposed},
      Flag{has_wide_units<typename TilesOf<kType>::Element>(arguments)});
}

}  // namespace jgg::fp64
