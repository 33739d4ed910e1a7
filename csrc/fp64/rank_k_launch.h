// From run-time arguments to one compiled kernel, and its launches.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "fp64/rank_k_kernel.h"
#include "fp64/tile_table.h"

namespace jgg::fp64 {

// A block for each place on the device, or for each tile if those are fewer.
template <class Config>
cudaError_t launch_blocks(typename RankKProblem<Config>::Params const& params,
                          cudaStream_t stream) {
  int device, multiprocessors;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  auto const kernel = rank_k_kernel<Config>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Config::kSharedBytes);
  if (status != cudaSuccess) return status;

  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(std::min(multiprocessors * Config::kBlocks, params.units));
  launch.blockDim = dim3(Config::kThreads);
  launch.dynamicSmemBytes = Config::kSharedBytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

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
    cudaError_t const status = launch_blocks<Config>(*params, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Whether all operands can be copied 16 bytes at a time: every row of every matrix begins at a
// multiple of them.
template <class Element>
bool has_wide_units(RankKArguments const& arguments) {
  auto const fits = [](void const* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return std::all_of(
      arguments.stacks.begin(), arguments.stacks.end(), [&](RankKStack const& stack) {
        int const contiguous = arguments.transpose ? stack.n : stack.k;
        return contiguous * sizeof(Element) % 16 == 0 && fits(stack.a) && fits(stack.b);
      });
}

template <class Shape, bool kTransposed>
cudaError_t launch_any_unit(RankKArguments const& arguments, cudaStream_t stream) {
  using Element = typename Shape::Element;
  if constexpr (sizeof(Element) < 16) {
    if (!has_wide_units<Element>(arguments)) {
      return launch_rank_k<KernelConfig<Shape, kTransposed, 8>>(arguments, stream);
    }
  }
  return launch_rank_k<KernelConfig<Shape, kTransposed, 16>>(arguments, stream);
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
