#include <cutlass/numeric_types.h>

#include "rank_k/launch.h"

namespace jgg::sm90 {

cudaError_t rank_k_bf16(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  return launch_any_rank_k<cutlass::bfloat16_t>(config, arguments, stream);
}

}  // namespace jgg::sm90
