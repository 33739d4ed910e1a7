// Selects the compiled kernel of the gradients of weights by the run-time arguments, and launches
// it.
#pragma once

#include "mlp/weight_gradients.h"
#include "ragged/contracting_launch.h"

namespace jgg::mlp {

// Rows are contracted, so x [m, k] and rhs [m, n] are both contiguous along the dimension that is
// kept.
template <ElementType kType>
cudaError_t weight_gradients_of(TileConfig config, WeightGradientArguments const& arguments,
                                cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto gathers) {
        using Element = sm90::Typed<kType>;
        using Config = sm90::ConfigOf<decltype(tile), Element, Element, Major::kMN, Major::kMN>;
        auto const launch = [&]<class Whole>(std::type_identity<Whole>) {
          using Cut = sm90::CutContracting<Whole>;
          return sm90::launch_contracting<Whole, Cut>(arguments, stream);
        };
        constexpr bool kIsWide = std::is_same_v<decltype(tile), sm90::WideTile>;
        if constexpr (gathers.value) {
          if (arguments.rhs[1] == nullptr) {
            return launch(std::type_identity<DownWeightGradient<Config>>{});
          }
        }
        if constexpr (kIsWide || (gathers.value && !sm90::kIsNarrow<Config>)) {
          return launch(std::type_identity<WeightGradients<Config, gathers.value>>{});
        }
        return kNotCompiled;
      },
      OneTileOf<sm90::WeightGradientTiles>{config}, Flag{arguments.rows != nullptr});
}

}  // namespace jgg::mlp
