#include "sm90/f32/launch.h"
#include "sm90/ragged_noncontracting.h"

namespace jgg::sm90 {

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
cudaError_t ragged_noncontracting_f32(TileConfig config, RaggedDotArguments const& arguments,
                                      cudaStream_t stream) {
  using cute::GMMA::Major;
  return f32::launch_any<RaggedNoncontracting, Major::K, Major::MN>(config, arguments, stream);
}

}  // namespace jgg::sm90
