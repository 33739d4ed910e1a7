#include <cutlass/numeric_types.h>

#include "sm90/launch.h"
#include "sm90/ragged_noncontracting.h"

namespace jgg::sm90 {

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
cudaError_t ragged_noncontracting_f16(TileConfig config, RaggedDotArguments const& arguments,
                                      cudaStream_t stream) {
  using cute::GMMA::Major;
  return launch_any<RaggedNoncontracting, cutlass::half_t, Major::K, Major::MN>(config, arguments,
                                                                                stream);
}

}  // namespace jgg::sm90
