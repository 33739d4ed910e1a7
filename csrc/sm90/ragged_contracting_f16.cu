#include <cutlass/numeric_types.h>

#include "sm90/launch.h"
#include "sm90/ragged_contracting.h"

namespace jgg::sm90 {

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along what is kept.
cudaError_t ragged_contracting_f16(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  using cute::GMMA::Major;
  return launch_any<RaggedContracting, cutlass::half_t, Major::MN, Major::MN>(config, arguments,
                                                                              stream);
}

}  // namespace jgg::sm90
