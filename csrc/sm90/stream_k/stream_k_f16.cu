#include <cutlass/numeric_types.h>

#include "sm90/stream_k/launch.h"

namespace jgg::sm90::stream_k {

// rhs [g, k, n] is contiguous along N.
cudaError_t ragged_noncontracting_f16(TileConfig config, RaggedDotArguments const& arguments,
                                      cudaStream_t stream) {
  return launch_any<cutlass::half_t, cute::GMMA::Major::MN>(config, arguments, stream);
}

}  // namespace jgg::sm90::stream_k
