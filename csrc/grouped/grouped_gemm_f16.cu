#include <cutlass/numeric_types.h>

#include "grouped/launch.h"

namespace jgg::sm90 {

cudaError_t grouped_gemm_f16(TileConfig config, GroupedGemmArguments const& arguments,
                             cudaStream_t stream) {
  return launch_any_grouped_gemm<cutlass::half_t>(config, arguments, stream);
}

}  // namespace jgg::sm90
