// The launch of a noncontracting FP8 product.
#pragma once

#include "fp8/scaled_launch.h"
#include "fp8/scaled_noncontracting.h"

namespace jgg::fp8 {

template <ElementType kType>
cudaError_t scaled_noncontracting(TileConfig config, ScaledArguments const& arguments,
                                  cudaStream_t stream) {
  return launch_scaled<NoncontractingTiles, ScaledNoncontracting, WholeTiles,
                       /*kColumnScales=*/false, kType>(config, arguments, stream);
}

}  // namespace jgg::fp8
