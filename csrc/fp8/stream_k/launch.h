// The launch of a noncontracting FP8 product whose last wave is cut along K.
#pragma once

#include "fp8/scaled_launch.h"
#include "fp8/stream_k/pieces.h"

namespace jgg::fp8 {

template <ElementType kType>
cudaError_t scaled_noncontracting_stream_k(TileConfig config, ScaledArguments const& arguments,
                                           cudaStream_t stream) {
  return launch_scaled<StreamKTiles, stream_k::Noncontracting, stream_k::Pieces,
                       /*kColumnScales=*/false, kType>(config, arguments, stream);
}

}  // namespace jgg::fp8
