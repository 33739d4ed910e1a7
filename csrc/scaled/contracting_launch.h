// The launch of a contracting FP8 product.
#pragma once

#include "scaled/contracting.h"
#include "scaled/launch.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_contracting(TileConfig config, ScaledArguments const& arguments,
                               cudaStream_t stream) {
  return launch_scaled<ScaledContractingTiles, ScaledContracting, WholeScaledTiles,
                       /*kColumnScales=*/true, kType>(config, arguments, stream);
}

}  // namespace jgg::sm90
