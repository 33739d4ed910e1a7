// Launches noncontracting FP8 products.
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

// Launches the product whose rows of lhs lie anywhere in memory.
template <ElementType kType>
cudaError_t scaled_gathered(TileConfig config, ScaledArguments const& arguments,
                            cudaStream_t stream) {
  return launch_scaled<ScaledNoncontractingTiles, GatheredScaledNoncontracting, WholeScaledTiles,
                       kType>(config, arguments, stream);
}

}  // namespace jgg::sm90
