// The launches of a noncontracting FP8 product whose scales are the same all along K.
#pragma once

#include "scaled/cut_noncontracting.h"
#include "scaled/launch.h"
#include "sm90/scaled_pieces.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting_channels(TileConfig config, ScaledArguments const& arguments,
                                           cudaStream_t stream) {
  return Flag{!arguments.fast_accumulation}([&](auto promotes) {
    return launch_scaled<ScaledNoncontractingTiles, ChannelScaledNoncontracting, WholeScaledTiles,
                         /*kColumnScales=*/false, kType, /*kChannelScales=*/true,
                         /*kTransposesOut=*/false, /*kStepScales=*/false, promotes.value>(
        config, arguments, stream);
  });
}

// In pieces, sums are promoted whether they have to be or not: without, they and those of another
// block spill a kilobyte.
template <ElementType kType>
cudaError_t cut_noncontracting_channels(TileConfig config, ScaledArguments const& arguments,
                                        cudaStream_t stream) {
  return launch_scaled<ScaledStreamKTiles, CutChannelScaledNoncontracting, ScaledPieces,
                       /*kColumnScales=*/false, kType, /*kChannelScales=*/true,
                       /*kTransposesOut=*/false, /*kStepScales=*/false>(config, arguments, stream);
}

}  // namespace jgg::sm90
