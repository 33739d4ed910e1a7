// The launch of a noncontracting FP8 product.
#pragma once

#include "scaled/gathered_noncontracting.h"
#include "scaled/launch.h"
#include "scaled/noncontracting.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting(TileConfig config, ScaledArguments const& arguments,
                                  cudaStream_t stream) {
  return launch_scaled<ScaledNoncontractingTiles, ScaledNoncontracting, WholeScaledTiles, kType>(
      config, arguments, stream);
}

// Gathered variant; compiled with the same FFMA pacing as scaled_noncontracting.
template <ElementType kType>
cudaError_t scaled_gathered(TileConfig config, ScaledArguments const& arguments,
                            cudaStream_t stream) {
  return launch_scaled<ScaledNoncontractingTiles, GatheredScaledNoncontracting, WholeScaledTiles,
                       kType>(config, arguments, stream);
}

}  // namespace jgg::sm90
