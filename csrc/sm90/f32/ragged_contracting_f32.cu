#include "sm90/f32/launch.h"
#include "sm90/ragged_contracting.h"

namespace jgg::sm90 {
namespace {

template <class Config>
using Written = RaggedContracting<Config>;

template <class Config>
using Added = RaggedContracting<Config, /*kAdds=*/true>;

}  // namespace

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along what is kept.
cudaError_t ragged_contracting_f32(TileConfig config, RaggedDotArguments const& arguments,
                                   cudaStream_t stream) {
  using cute::GMMA::Major;
  return arguments.accumulate
             ? f32::launch_any<Added, Major::MN, Major::MN>(config, arguments, stream)
             : f32::launch_any<Written, Major::MN, Major::MN>(config, arguments, stream);
}

}  // namespace jgg::sm90
