#include "mlp/instances.h"

namespace jgg::mlp {

cudaError_t gated_bf16(GatedArguments const& arguments, cudaStream_t stream) {
  return launch_gated<cutlass::bfloat16_t>(arguments, stream);
}

cudaError_t gradient_bf16(GatedGradientArguments const& arguments, cudaStream_t stream) {
  return launch_gradient<cutlass::bfloat16_t>(arguments, stream);
}

cudaError_t paired_bf16(PairedArguments const& arguments, cudaStream_t stream) {
  return launch_paired<cutlass::bfloat16_t>(arguments, stream);
}

}  // namespace jgg::mlp
