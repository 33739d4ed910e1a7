#include <cutlass/numeric_types.h>

#include "sm90/launch.h"
#include "sm90/ragged_noncontracting.h"

namespace jgg::sm90 {

// rhs [g, k, n] is contiguous along N, its transpose along K.
cudaError_t ragged_noncontracting_f16(TileConfig config, RaggedDotArguments const& arguments,
                                      cudaStream_t stream) {
  using cute::GMMA::Major;
  using Element = cutlass::half_t;
  return arguments.transpose_rhs ? launch_major<RaggedNoncontracting, Element, Major::K, Major::K>(
                                       config, arguments, stream)
                                 : launch_major<RaggedNoncontracting, Element, Major::K, Major::MN>(
                                       config, arguments, stream);
}

}  // namespace jgg::sm90
