#include "fp64/rank_k_launch.h"

namespace jgg::fp64 {

cudaError_t rank_k_c128(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  return launch_any_rank_k(ShapesOf<Complex128>::List{}, config, arguments, stream);
}

}  // namespace jgg::fp64
