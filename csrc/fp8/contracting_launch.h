// The launch of a contracting FP8 product.
#pragma once

#include "fp8/scaled_contracting.h"
#include "fp8/scaled_launch.h"

namespace jgg::fp8 {

template <ElementType kType>
cudaError_t scaled_contracting(TileConfig config, ScaledArguments const& arguments,
                               cudaStream_t stream) {
  return launch_scaled<ContractingTiles, ScaledContracting, WholeTiles, /*kColumnScales=*/true,
                       kType>(config, arguments, stream);
}

}  // namespace jgg::fp8
