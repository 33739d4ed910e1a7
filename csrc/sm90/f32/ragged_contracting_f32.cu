#include "sm90/f32/launch.h"
#include "sm90/ragged_contracting.h"

namespace jgg::sm90 {

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along what is kept.
cudaError_t ragged_contracting_f32(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  using cute::GMMA::Major;
  return f32::launch_any<RaggedContracting, Major::MN, Major::MN>(config, arguments, stream);
}

}  // namespace jgg::sm90
