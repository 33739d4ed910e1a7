// From run-time arguments to one compiled kernel, and its launches.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "fp64/launch_blocks.h"
#include "fp64/rank_k_kernel.h"
#include "fp64/tile_table.h"

namespace jgg::fp64 {

// One launch for every kMaxStacks stacks.
template <class Config>
cudaError_t launch_rank_k(RankKArguments const& arguments, cudaStream_t stream) {
  using Problem = RankKProblem<Config>;
  // Too large for the stack of a thread that is not ours.
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

// Whether all operands can be copied 16 bytes at a time.
template <class Element>
bool has_wide_units(RankKArguments const& arguments) {
  return std::all_of(arguments.stacks.begin(), arguments.stacks.end(),
                     [&](RankKStack const& stack) {
                       int const contiguous = arguments.transpose ? stack.n : stack.k;
                       return has_wide_units<Element>(stack.a, contiguous) &&
                              has_wide_units<Element>(stack.b, contiguous);
                     });
}

template <class Shape, bool kTransposed>
cudaError_t launch_any_unit(RankKArguments const& arguments, cudaStream_t stream) {
  using Element = typename Shape::Element;
  if constexpr (sizeof(Element) < 16) {
    if (!has_wide_units<Element>(arguments)) {
      return launch_rank_k<KernelConfig<Shape, kTransposed, kTransposed, 8>>(arguments, stream);
    }
  }
  return launch_rank_k<KernelConfig<Shape, kTransposed, kTransposed, 16>>(arguments, stream);
}

template <class... Shapes>
cudaError_t launch_any_rank_k(ShapeList<Shapes...>, TileConfig config,
                              RankKArguments const& arguments, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidConfiguration;
  auto const launch_if_asked_for = [&](auto shape) {
    using Shape = decltype(shape);
    if (config.tile_m != Shape::kTile || config.tile_n != Shape::kTile || config.cluster != 1) {
      return;
    }
    status = arguments.transpose ? launch_any_unit<Shape, true>(arguments, stream)
                                 : launch_any_unit<Shape, false>(arguments, stream);
  };
  (launch_if_asked_for(Shapes{}), ...);
  return status;
}

}  // namespace jgg::fp64
