#include "fp8/transposed_launch.h"

namespace jgg::fp8 {

cudaError_t transposed_e4m3(ScaledTile tile, ScaledArguments const& arguments,
                            cudaStream_t stream) {
  return launch_transposed<cutlass::float_e4m3_t>(TransposedTiles{}, tile, arguments, stream);
}

}  // namespace jgg::fp8
