// Selects the compiled kernel of a noncontracting product by the run-time arguments, and launches
// it.
#pragma once

#include "ragged/launch.h"
#include "ragged/noncontracting.h"
#include "ragged/tiles.h"

namespace jgg::sm90 {

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
template <ElementType kType>
cudaError_t noncontracting(TileConfig config, RaggedDotArguments const& arguments,
                           cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto, auto transpose_rhs, auto out_type) {
        using Config = ConfigOf<decltype(tile), Typed<kType>, Typed<out_type>, Major::kK,
                                major(Major::kMN, transpose_rhs)>;
        if constexpr (Config::kRhsMajor == Major::kMN && sizeof(typename Config::Output) == 2 &&
                      Config::kSubtileSlots < Config::kSubtiles) {
          using Few = WithWholeTileSlots<Config>;
          if (arguments.k <= Few::kMostSteps * Config::kTileK) {
            return launch_tiles<RaggedNoncontracting<Few>>(arguments, stream);
          }
        }
        return launch_tiles<RaggedNoncontracting<Config>>(arguments, stream);
      },
      OneTileOf<NoncontractingTiles>{config}, OneOf<false>{arguments.transpose_lhs},
      Flag{arguments.transpose_rhs}, OneOf<kType, ElementType::kF32>{arguments.out_type});
}

}  // namespace jgg::sm90
