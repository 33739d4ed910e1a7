// From run-time arguments to one compiled kernel, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "sm90/kernel.h"
#include "sm90/persistent_launch.h"
#include "sm90/ragged_dot.h"
#include "sm90/tile_table.h"

namespace jgg::sm90 {

template <class Problem, class Loop = DefaultMainloop<Problem>>
cudaError_t launch(RaggedDotArguments const& arguments, cudaStream_t stream) {
  using Config = typename Problem::Config;
  typename Problem::Params params;
  cudaError_t status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;

  return launch_persistent<Config>(ragged_kernel<Problem, Loop>, params,
                                   Problem::max_units(arguments), stream);
}

// Turns a run-time boolean into a compile-time one.
template <class Function>
cudaError_t with_bool(bool value, Function function) {
  return value ? function(std::true_type{}) : function(std::false_type{});
}

constexpr cute::GMMA::Major major(cute::GMMA::Major plain, bool transpose) {
  using cute::GMMA::Major;
  return (plain == Major::K) != transpose ? Major::K : Major::MN;
}

// Hands the configuration of the compiled kernel to `function`. `kLhsMajor` and `kRhsMajor` are the
// majors of operands that are not transposed.
template <class Tiles, class Element, cute::GMMA::Major kLhsMajor, cute::GMMA::Major kRhsMajor,
          class Function>
cudaError_t with_config(TileConfig config, RaggedDotArguments const& arguments, Function function) {
  return with_tile(Tiles{}, config, [&](auto tile) {
    return with_bool(arguments.transpose_lhs, [&](auto transpose_lhs) {
      return with_bool(arguments.transpose_rhs, [&](auto transpose_rhs) {
        return with_bool(arguments.out_type == ElementType::kF32, [&](auto f32_out) {
          using Tile = decltype(tile);
          using Output = std::conditional_t<f32_out.value, float, Element>;
          return function(KernelConfig<Element, Output, major(kLhsMajor, transpose_lhs.value),
                                       major(kRhsMajor, transpose_rhs.value), Tile::kTileM,
                                       Tile::kTileN, Tile::kCluster, Tile::kKind>{});
        });
      });
    });
  });
}

// Launches the kernel of a noncontracting family, `Problem`.
template <template <class> class Problem, class Element, cute::GMMA::Major kLhsMajor,
          cute::GMMA::Major kRhsMajor>
cudaError_t launch_any(TileConfig config, RaggedDotArguments const& arguments,
                       cudaStream_t stream) {
  return with_config<NoncontractingTiles, Element, kLhsMajor, kRhsMajor>(
      config, arguments, [&](auto of) { return launch<Problem<decltype(of)>>(arguments, stream); });
}

}  // namespace jgg::sm90
