#include <cutlass/numeric_types.h>

#include "sm90/skew/launch.h"

namespace jgg::sm90 {

cudaError_t ragged_contracting_bf16(TileConfig config, RaggedDotArguments const& arguments,
                                    cudaStream_t stream) {
  return skew::launch_any<cutlass::bfloat16_t>(config, arguments, stream);
}

}  // namespace jgg::sm90
