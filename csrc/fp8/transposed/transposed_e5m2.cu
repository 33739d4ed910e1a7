#include "fp8/transposed/launch.h"

namespace jgg::fp8 {

cudaError_t transposed_e5m2(TileConfig tile, ScaledArguments const& arguments,
                            cudaStream_t stream) {
  return transposed::launch_any<cutlass::float_e5m2_t>(tile, arguments, stream);
}

}  // namespace jgg::fp8
