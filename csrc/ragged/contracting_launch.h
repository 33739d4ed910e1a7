// Selects the compiled kernel of a contracting product by the run-time arguments, and launches it.
#pragma once

#include <type_traits>

#include "ragged/contracting_roles.h"
#include "ragged/cut_contracting.h"
#include "ragged/launch.h"
#include "ragged/tiles.h"

namespace jgg::sm90 {

// The mainloop for whole tiles. Narrow tiles release no stages early, because they have more stages
// to load ahead, except with rows that are gathered, which are late in every step.
template <class Problem>
using WholeMainloop = std::conditional_t<
    Problem::Config::kTakesTurns, PingpongMainloop<Problem>,
    CooperativeMainloop<Problem, kIsNarrow<typename Problem::Config> && !kGathersLhs<Problem>
                                     ? kNoSteps
                                     : kStepsOfParams>>;

// Launches a kernel of whole tiles. If some group sizes would make pieces faster, launches a kernel
// that chooses between whole tiles and the pieces of `Cut`.
template <class Whole, class Cut, class Arguments>
cudaError_t launch_contracting(Arguments const& arguments, cudaStream_t stream) {
  using Config = typename Whole::Config;
  using Loop = WholeMainloop<Whole>;
  if (!Cut::can_be_skewed(arguments)) return launch_tiles<Whole, Loop>(arguments, stream);
  ContractingParams<Whole, Cut> params;
  cudaError_t status = Whole::make_params(arguments, params.whole);
  if (status != cudaSuccess) return status;
  status = Cut::make_params(arguments, params.cut);
  if (status != cudaSuccess) return status;
  // All clusters can get pieces, however few tiles there are.
  return launch_persistent<ContractingRoles<Whole, Loop, Cut>>(params, kMaxClusters<Config>,
                                                               arguments.max_sms, stream);
}

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along the dimension that is
// kept. There are no kernels for operands that are contiguous along m: XLA transposes such
// operands.
template <ElementType kType>
cudaError_t contracting(TileConfig config, RaggedDotArguments const& arguments,
                        cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto, auto, auto out_type, auto accumulate) {
        using Config =
            ConfigOf<decltype(tile), Typed<kType>, Typed<out_type>, Major::kMN, Major::kMN>;
        constexpr bool kIsFloat = out_type == ElementType::kF32;
        constexpr bool kIsBuilt =
            Config::kTakesTurns ? kIsFloat && !accumulate : kIsFloat || !accumulate;
        if constexpr (kIsBuilt) {
          using CutConfig = ConfigOf<CutTileOf<decltype(tile)>, Typed<kType>, Typed<out_type>,
                                     Major::kMN, Major::kMN>;
          using Cut = CutContracting<RaggedContracting<CutConfig, accumulate>>;
          return launch_contracting<RaggedContracting<Config, accumulate>, Cut>(arguments, stream);
        }
        return kNotCompiled;
      },
      OneTileOf<ContractingTiles>{config}, OneOf<false>{arguments.transpose_lhs},
      OneOf<false>{arguments.transpose_rhs}, OneOf<kType, ElementType::kF32>{arguments.out_type},
      Flag{arguments.accumulate});
}

}  // namespace jgg::sm90
