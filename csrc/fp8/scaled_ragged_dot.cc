#include "fp8/scaled_ragged_dot.h"

namespace jgg::fp8 {

// One translation unit each, so that they compile side by side.
cudaError_t scaled_noncontracting_e4m3(ScaledTile, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_noncontracting_e5m2(ScaledTile, ScaledArguments const&, cudaStream_t);
cudaError_t transposed_e4m3(ScaledTile, ScaledArguments const&, cudaStream_t);
cudaError_t transposed_e5m2(ScaledTile, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_contracting_e4m3(ScaledTile, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_contracting_e5m2(ScaledTile, ScaledArguments const&, cudaStream_t);

namespace stream_k {
cudaError_t scaled_noncontracting_e4m3(ScaledTile, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_noncontracting_e5m2(ScaledTile, ScaledArguments const&, cudaStream_t);
}  // namespace stream_k

cudaError_t scaled_noncontracting(ScaledTile tile, ScaledArguments const& arguments,
                                  cudaStream_t stream) {
  bool const e4m3 = arguments.lhs_type == Fp8Type::kE4M3;
  if (tile.stream_k) {
    return e4m3 ? stream_k::scaled_noncontracting_e4m3(tile, arguments, stream)
                : stream_k::scaled_noncontracting_e5m2(tile, arguments, stream);
  }
  if (is_transposed(tile)) {
    return e4m3 ? transposed_e4m3(tile, arguments, stream)
                : transposed_e5m2(tile, arguments, stream);
  }
  return e4m3 ? scaled_noncontracting_e4m3(tile, arguments, stream)
              : scaled_noncontracting_e5m2(tile, arguments, stream);
}

cudaError_t scaled_contracting(ScaledTile tile, ScaledArguments const& arguments,
                               cudaStream_t stream) {
  if (tile.stream_k) return cudaErrorInvalidConfiguration;
  return arguments.lhs_type == Fp8Type::kE4M3 ? scaled_contracting_e4m3(tile, arguments, stream)
                                              : scaled_contracting_e5m2(tile, arguments, stream);
}

}  // namespace jgg::fp8
