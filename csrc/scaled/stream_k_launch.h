// Launches noncontracting FP8 products with stream-K kernels, whose last wave is cut along K.
#pragma once

#include "scaled/cut_noncontracting.h"
#include "scaled/launch.h"
#include "sm90/scaled_pieces.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting_stream_k(TileConfig config, ScaledArguments const& arguments,
                                           cudaStream_t stream) {
  return launch_scaled<ScaledStreamKTiles, CutScaledNoncontracting, ScaledPieces, kType>(
      config, arguments, stream);
}

// Pieces promote their sums to float32 registers even for fast accumulation. Otherwise these sums
// and the sums handed over by another thread block spill a kilobyte of registers.
template <ElementType kType>
cudaError_t cut_noncontracting_channels(TileConfig config, ScaledArguments const& arguments,
                                        cudaStream_t stream) {
  return launch_scaled<ScaledStreamKTiles, CutChannelScaledNoncontracting, ScaledPieces, kType,
                       ScaledForm{.channel_scales = true, .step_scales = false}>(config, arguments,
                                                                                 stream);
}

}  // namespace jgg::sm90
