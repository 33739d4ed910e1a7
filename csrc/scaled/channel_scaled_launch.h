// Launches a noncontracting FP8 product whose scales do not change along K.
#pragma once

#include "scaled/channel_scaled.h"
#include "scaled/launch.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting_channels(TileConfig config, ScaledArguments const& arguments,
                                           cudaStream_t stream) {
  return Flag{!arguments.fast_accumulation}([&](auto promotes) {
    constexpr ScaledForm kForm{
        .channel_scales = true, .step_scales = false, .promotes = promotes.value};
    return launch_scaled<ScaledNoncontractingTiles, ChannelScaledNoncontracting, WholeScaledTiles,
                         kType, kForm>(config, arguments, stream);
  });
}

}  // namespace jgg::sm90
