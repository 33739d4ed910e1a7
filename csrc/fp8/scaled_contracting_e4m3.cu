#include "fp8/scaled_contracting.h"
#include "fp8/scaled_launch.h"

namespace jgg::fp8 {

cudaError_t scaled_contracting_e4m3(TileConfig tile, ScaledArguments const& arguments,
                                    cudaStream_t stream) {
  return launch_scaled<ScaledContracting, /*kColumnScales=*/true, cutlass::float_e4m3_t>(
      ContractingTiles{}, tile, arguments, stream);
}

}  // namespace jgg::fp8
