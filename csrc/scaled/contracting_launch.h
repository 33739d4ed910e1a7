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

template <ElementType kType>
cudaError_t scaled_contracting_channels(TileConfig config, ScaledArguments const& arguments,
                                        cudaStream_t stream) {
  if (arguments.transposes_out && arguments.out_type == ElementType::kF32) {
    return kNotCompiled;
  }
  return Flag{arguments.transposes_out}([&](auto transposes_out) {
    return launch_scaled<ScaledContractingTiles, ScaledContracting, WholeScaledTiles,
                         /*kColumnScales=*/false, kType, /*kChannelScales=*/true,
                         transposes_out.value>(config, arguments, stream);
  });
}

template <ElementType kType>
cudaError_t scaled_contracting_pairs(TileConfig config, ScaledArguments const& arguments,
                                     cudaStream_t stream) {
  if (!arguments.transposes_out || arguments.out_type == ElementType::kF32) {
    return kNotCompiled;
  }
  return launch_scaled<ScaledContractingTiles, ScaledContracting, WholeScaledTiles,
                       /*kColumnScales=*/false, kType, /*kChannelScales=*/true,
                       /*kTransposesOut=*/true, /*kStepScales=*/true, /*kPromotes=*/true,
                       /*kResults=*/2>(config, arguments, stream);
}

}  // namespace jgg::sm90
