// Launches contracting FP8 products.
#pragma once

#include "scaled/contracting.h"
#include "scaled/launch.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_contracting(TileConfig config, ScaledArguments const& arguments,
                               cudaStream_t stream) {
  return launch_scaled<ScaledContractingTiles, ScaledContracting, WholeScaledTiles, kType,
                       ScaledForm{.column_scales = true}>(config, arguments, stream);
}

template <ElementType kType>
cudaError_t scaled_contracting_channels(TileConfig config, ScaledArguments const& arguments,
                                        cudaStream_t stream) {
  if (arguments.transposes_out && arguments.out_type == ElementType::kF32) {
    return kNotCompiled;
  }
  return Flag{arguments.transposes_out}([&](auto transposes_out) {
    constexpr ScaledForm kForm{.channel_scales = true, .transposes_out = transposes_out.value};
    return launch_scaled<ScaledContractingTiles, ScaledContracting, WholeScaledTiles, kType, kForm>(
        config, arguments, stream);
  });
}

template <ElementType kType>
cudaError_t scaled_contracting_pairs(TileConfig config, ScaledArguments const& arguments,
                                     cudaStream_t stream) {
  if (!arguments.transposes_out || arguments.out_type == ElementType::kF32) {
    return kNotCompiled;
  }
  constexpr ScaledForm kForm{.channel_scales = true, .transposes_out = true, .results = 2};
  return launch_scaled<ScaledContractingTiles, ScaledContracting, WholeScaledTiles, kType, kForm>(
      config, arguments, stream);
}

}  // namespace jgg::sm90
