// Selects the compiled kernel by the run-time arguments, and launches it.
#pragma once

#include <memory>

#include "grouped/problem.h"
#include "grouped/tiles.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

template <class Problem, class Loop = CooperativeMainloop<Problem>>
cudaError_t launch_grouped_gemm(GroupedGemmArguments const& arguments, cudaStream_t stream) {
  // Parameters are on the heap, because the stack of XLA's thread may be too small for them.
  auto const params = std::make_unique<typename Problem::Params>();
  cudaError_t const status = Problem::make_params(arguments, *params);
  if (status != cudaSuccess) return status;
  return launch_persistent<ListRoles<Problem, Loop>>(
      *params, Problem::max_clusters(arguments, *params), kMostMultiprocessors, stream);
}

template <ElementType kType>
cudaError_t grouped_gemm_16bit(TileConfig config, GroupedGemmArguments const& arguments,
                               cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto transpose_lhs, auto transpose_rhs, auto out_type, auto few) {
        using Config = ConfigOf<decltype(tile), Typed<kType>, Typed<out_type>,
                                major(Major::kK, transpose_lhs), major(Major::kMN, transpose_rhs)>;
        // Large tiles have no kernel with few descriptors, because such a kernel would save much
        // less time than one large tile takes.
        constexpr bool kIsSmall = decltype(tile)::kTileN < 256;
        constexpr int kCapacity = few && kIsSmall ? kFewListedProblems : kMaxListedProblems;
        return launch_grouped_gemm<GroupedGemm<Config, kCapacity>>(arguments, stream);
      },
      OneTileOf<GroupedGemmTiles>{config}, Flag{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs}, OneOf<kType, ElementType::kF32>{arguments.out_type},
      Flag{arguments.problems.size() <= kFewListedProblems});
}

}  // namespace jgg::sm90
