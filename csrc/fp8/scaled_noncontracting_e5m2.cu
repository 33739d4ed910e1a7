#include "fp8/scaled_launch.h"
#include "fp8/scaled_noncontracting.h"

namespace jgg::fp8 {

cudaError_t scaled_noncontracting_e5m2(TileConfig tile, ScaledArguments const& arguments,
                                       cudaStream_t stream) {
  return launch_scaled<ScaledNoncontracting, /*kColumnScales=*/false, cutlass::float_e5m2_t>(
      NoncontractingTiles{}, tile, arguments, stream);
}

}  // namespace jgg::fp8
