#include "fp8/scaled_launch.h"
#include "fp8/stream_k/pieces.h"

namespace jgg::fp8::stream_k {

cudaError_t scaled_noncontracting_e5m2(TileConfig tile, ScaledArguments const& arguments,
                                       cudaStream_t stream) {
  return launch_scaled<Noncontracting, /*kColumnScales=*/false, cutlass::float_e5m2_t, Pieces>(
      StreamKTiles{}, tile, arguments, stream);
}

}  // namespace jgg::fp8::stream_k
