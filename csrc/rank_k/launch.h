// Selects the compiled kernel by the run-time arguments, and launches it.
#pragma once

#include <algorithm>
#include <memory>

#include "rank_k/fine_roles.h"
#include "rank_k/problem.h"
#include "rank_k/tiles.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/mainloop/fine.h"
#include "sm90/mainloop/triangular.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

// Calls launch(params, units) once for every kMaxStacks stacks.
template <class Problem, class Launch>
cudaError_t launch_stacks(RankKArguments const& arguments, Launch launch) {
  // Parameters are on the heap, because the stack of XLA's thread may be too small for them.
  auto const params = std::make_unique<typename Problem::Params>();
  int const count = static_cast<int>(arguments.stacks.size());
  for (int first = 0; first < count; first += Problem::kMaxStacks) {
    int units;
    cudaError_t status =
        Problem::make_params(arguments, &arguments.stacks[first],
                             std::min(count - first, Problem::kMaxStacks), *params, units);
    if (status != cudaSuccess) return status;
    status = launch(*params, units);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <class Problem, class Loop>
cudaError_t launch_rank_k(RankKArguments const& arguments, cudaStream_t stream) {
  return launch_stacks<Problem>(arguments, [&](auto const& params, int units) {
    return launch_persistent<ListRoles<Problem, Loop>>(params, units, kMostMultiprocessors, stream);
  });
}

// Launches a cluster for each unit.
template <class Problem>
cudaError_t launch_fine(RankKArguments const& arguments, cudaStream_t stream) {
  return launch_stacks<Problem>(arguments, [&](auto const& params, int units) {
    bool const is_plain =
        !params.adds_c && !params.adds_diagonal && params.other == OtherTriangle::kZero;
    return Flag{is_plain}([&](auto plain) {
      return launch_clusters<FineRoles<Problem, FineMainloop<Problem>, plain>>(params, units,
                                                                               stream);
    });
  });
}

template <ElementType kType>
cudaError_t rank_k_16bit(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto transpose, auto out_type) {
        constexpr auto kMajor = major(Major::kK, transpose);
        using Config = ConfigOf<decltype(tile), Typed<kType>, Typed<out_type>, kMajor, kMajor>;
        using Problem = RankK<Config>;
        if constexpr (Config::kKind == KernelKind::kFine) {
          return launch_fine<Problem>(arguments, stream);
        } else {
          return launch_rank_k<Problem, TriangularMainloop<Problem>>(arguments, stream);
        }
      },
      OneTileOf<RankKTiles>{config}, Flag{arguments.transpose},
      OneOf<kType, ElementType::kF32>{arguments.out_type});
}

}  // namespace jgg::sm90
