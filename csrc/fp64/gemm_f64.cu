#include "fp64/gemm_launch.h"

namespace jgg::fp64 {

cudaError_t gemm_f64(TileConfig config, GemmArguments const& arguments, cudaStream_t stream) {
  return launch_any_gemm(ShapesOf<double>::List{}, config, arguments, stream);
}

}  // namespace jgg::fp64
