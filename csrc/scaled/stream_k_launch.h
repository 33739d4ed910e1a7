// The launch of a noncontracting FP8 product whose last wave is cut along K.
#pragma once

#include "scaled/cut_noncontracting.h"
#include "scaled/launch.h"
#include "sm90/scaled_pieces.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting_stream_k(TileConfig config, ScaledArguments const& arguments,
                                           cudaStream_t stream) {
  return launch_scaled<ScaledStreamKTiles, CutScaledNoncontracting, ScaledPieces,
                       /*kColumnScales=*/false, kType>(config, arguments, stream);
}

}  // namespace jgg::sm90
