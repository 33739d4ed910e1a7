// The launch of a noncontracting FP8 product.
#pragma once

#include "scaled/gathered_noncontracting.h"
#include "scaled/launch.h"
#include "scaled/noncontracting.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting(TileConfig config, ScaledArguments const& arguments,
                                  cudaStream_t stream) {
  return launch_scaled<ScaledNoncontractingTiles, ScaledNoncontracting, WholeScaledTiles,
                       /*kColumnScales=*/false, kType>(config, arguments, stream);
}

// Its additions are paced as those are.
template <ElementType kType>
cudaError_t scaled_gathered(TileConfig config, ScaledArguments const& arguments,
                            cudaStream_t stream) {
  return launch_scaled<ScaledNoncontractingTiles, GatheredScaledNoncontracting, WholeScaledTiles,
                       /*kColumnScales=*/false, kType>(config, arguments, stream);
}

}  // namespace jgg::sm90
