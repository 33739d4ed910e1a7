#include "mlp/gated_ragged_dot.h"

namespace jgg::mlp {

cudaError_t gated_bf16(GatedArguments const& arguments, cudaStream_t stream);
cudaError_t gated_f16(GatedArguments const& arguments, cudaStream_t stream);
cudaError_t gradient_bf16(GatedGradientArguments const& arguments, cudaStream_t stream);
cudaError_t gradient_f16(GatedGradientArguments const& arguments, cudaStream_t stream);
cudaError_t paired_bf16(PairedArguments const& arguments, cudaStream_t stream);
cudaError_t paired_f16(PairedArguments const& arguments, cudaStream_t stream);

namespace {

// The one tile that is compiled, for two element types.
template <class Arguments>
cudaError_t launch(sm90::TileConfig config, Arguments const& arguments, cudaStream_t stream,
                   cudaError_t (*bf16)(Arguments const&, cudaStream_t),
                   cudaError_t (*f16)(Arguments const&, cudaStream_t)) {
  if (config.tile_m != 128 || config.tile_n != 256 || config.cluster != 2) {
    return cudaErrorInvalidConfiguration;
  }
  if (arguments.type == sm90::ElementType::kBf16) return bf16(arguments, stream);
  if (arguments.type == sm90::ElementType::kF16) return f16(arguments, stream);
  return cudaErrorInvalidConfiguration;
}

}  // namespace

cudaError_t gated_ragged_dot(sm90::TileConfig config, GatedArguments const& arguments,
                             cudaStream_t stream) {
  return launch(config, arguments, stream, gated_bf16, gated_f16);
}

cudaError_t gated_gradient(sm90::TileConfig config, GatedGradientArguments const& arguments,
                           cudaStream_t stream) {
  return launch(config, arguments, stream, gradient_bf16, gradient_f16);
}

cudaError_t paired_ragged_dot(sm90::TileConfig config, PairedArguments const& arguments,
                              cudaStream_t stream) {
  return launch(config, arguments, stream, paired_bf16, paired_f16);
}

}  // namespace jgg::mlp
