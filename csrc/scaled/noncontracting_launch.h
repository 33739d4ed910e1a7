// The launch of a noncontracting FP8 product.
#pragma once

#include "scaled/launch.h"
#include "scaled/noncontracting.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting(TileConfig config, ScaledArguments const& arguments,
                                  cudaStream_t stream) {
  return launch_scaled<ScaledNoncontractingTiles, ScaledNoncontracting, WholeScaledTiles,
                       /*kColumnScales=*/false, kType>(config, arguments, stream);
}

}  // namespace jgg::sm90
