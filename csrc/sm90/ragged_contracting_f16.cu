#include <cutlass/numeric_types.h>

#include "sm90/skew/launch.h"

namespace jgg::sm90 {

cudaError_t ragged_contracting_f16(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  return skew::launch_any<cutlass::half_t>(config, arguments, stream);
}

}  // namespace jgg::sm90
