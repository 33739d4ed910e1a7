#include "fp8/transposed/launch.h"

namespace jgg::fp8 {

cudaError_t transposed_e4m3(TileConfig tile, ScaledArguments const& arguments,
                            cudaStream_t stream) {
  return transposed::launch_any<cutlass::float_e4m3_t>(tile, arguments, stream);
}

}  // namespace jgg::fp8
