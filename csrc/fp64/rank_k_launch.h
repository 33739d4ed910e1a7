// Selects the compiled kernel by the run-time arguments, and launches it.
#pragma once

#include <algorithm>
#include <memory>

#include "dispatch.h"
#include "fp64/launch_blocks.h"
#include "fp64/rank_k_kernel.h"
#include "fp64/tile_table.h"

namespace jgg::fp64 {

// Launches a kernel for every kMaxStacks stacks.
template <class Config>
cudaError_t launch_rank_k(RankKArguments const& arguments, cudaStream_t stream) {
  using Problem = RankKProblem<Config>;
  // Parameters are on the heap, because the stack of XLA's thread may be too small for them.
  auto const params = std::make_unique<typename Problem::Params>();
  int const count = static_cast<int>(arguments.stacks.size());
  for (int first = 0; first < count; first += Problem::kMaxStacks) {
    Problem::make_params(arguments, &arguments.stacks[first],
                         std::min(count - first, Problem::kMaxStacks), *params);
    cudaError_t const status =
        launch_blocks<Config>(rank_k_kernel<Config>, *params, params->units, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Returns whether all operands can be copied 16 bytes at a time.
template <class Element>
bool has_wide_units(RankKArguments const& arguments) {
  return std::all_of(arguments.stacks.begin(), arguments.stacks.end(),
                     [&](RankKStack const& stack) {
                       int const contiguous = arguments.transpose ? stack.n : stack.k;
                       return has_wide_units<Element>(stack.a, contiguous) &&
                              has_wide_units<Element>(stack.b, contiguous);
                     });
}

template <ElementType kType>
cudaError_t fp64_rank_k(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  return with_constants(
      [&](auto shape, auto transpose, auto wide) {
        using Shape = decltype(shape);
        // A copy is at least one element, and complex128 elements have 16 bytes.
        constexpr int kUnitBytes = wide || sizeof(typename Shape::Element) == 16 ? 16 : 8;
        return launch_rank_k<KernelConfig<Shape, transpose, transpose, kUnitBytes>>(arguments,
                                                                                    stream);
      },
      OneTileOf<typename TilesOf<kType>::Table>{config}, Flag{arguments.transpose},
      Flag{has_wide_units<typename TilesOf<kType>::Element>(arguments)});
}

}  // namespace jgg::fp64
