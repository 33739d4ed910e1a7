// From run-time arguments to one compiled kernel, and its launch.
#pragma once

#include <memory>

#include "grouped/problem.h"
#include "grouped/tile_table.h"
#include "sm90/launch.h"
#include "sm90/list_kernel.h"

namespace jgg::sm90 {

template <class Problem, class Loop = Mainloop<Problem>>
cudaError_t launch_grouped_gemm(GroupedGemmArguments const& arguments, cudaStream_t stream) {
  // Too large for the stack of a thread that is not ours.
  auto const params = std::make_unique<typename Problem::Params>();
  cudaError_t const status = Problem::make_params(arguments, *params);
  if (status != cudaSuccess) return status;
  return launch_persistent<typename Problem::Config>(
      list_kernel<Problem, Loop>, *params, Problem::max_clusters(arguments, *params), stream);
}

template <class Element>
cudaError_t launch_any_grouped_gemm(TileConfig config, GroupedGemmArguments const& arguments,
                                    cudaStream_t stream) {
  using cute::GMMA::Major;
  return with_tile(GroupedGemmTiles{}, config, [&](auto tile) {
    return with_bool(arguments.transpose_lhs, [&](auto transpose_lhs) {
      return with_bool(arguments.transpose_rhs, [&](auto transpose_rhs) {
        return with_bool(arguments.out_type == ElementType::kF32, [&](auto f32_out) {
          using Tile = decltype(tile);
          using Output = std::conditional_t<f32_out.value, float, Element>;
          using Config = KernelConfig<Element, Output, major(Major::K, transpose_lhs.value),
                                      major(Major::MN, transpose_rhs.value), Tile::kTileM,
                                      Tile::kTileN, Tile::kCluster>;
          return with_bool(arguments.problems.size() <= kFewListedProblems, [&](auto few) {
            constexpr int kCapacity = few.value ? kFewListedProblems : kMaxListedProblems;
            return launch_grouped_gemm<GroupedGemm<Config, kCapacity>>(arguments, stream);
          });
        });
      });
    });
  });
}

}  // namespace jgg::sm90
