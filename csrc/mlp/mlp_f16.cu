#include "mlp/instances.h"

namespace jgg::mlp {

cudaError_t gated_f16(GatedArguments const& arguments, cudaStream_t stream) {
  return launch_gated<cutlass::half_t>(arguments, stream);
}

cudaError_t gradient_f16(GatedGradientArguments const& arguments, cudaStream_t stream) {
  return launch_gradient<cutlass::half_t>(arguments, stream);
}

cudaError_t paired_f16(PairedArguments const& arguments, cudaStream_t stream) {
  return launch_paired<cutlass::half_t>(arguments, stream);
}

}  // namespace jgg::mlp
