#include "fp8/scaled_ragged_dot.h"

namespace jgg::fp8 {

// One translation unit each, so that they compile side by side.
cudaError_t scaled_noncontracting_e4m3(TileConfig, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_noncontracting_e5m2(TileConfig, ScaledArguments const&, cudaStream_t);
cudaError_t transposed_e4m3(TileConfig, ScaledArguments const&, cudaStream_t);
cudaError_t transposed_e5m2(TileConfig, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_contracting_e4m3(TileConfig, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_contracting_e5m2(TileConfig, ScaledArguments const&, cudaStream_t);

namespace stream_k {
cudaError_t scaled_noncontracting_e4m3(TileConfig, ScaledArguments const&, cudaStream_t);
cudaError_t scaled_noncontracting_e5m2(TileConfig, ScaledArguments const&, cudaStream_t);
}  // namespace stream_k

cudaError_t scaled_noncontracting(TileConfig tile, ScaledArguments const& arguments,
                                  cudaStream_t stream) {
  bool const e4m3 = arguments.type == ElementType::kE4m3;
  if (tile.kind == KernelKind::kStreamK) {
    return e4m3 ? stream_k::scaled_noncontracting_e4m3(tile, arguments, stream)
                : stream_k::scaled_noncontracting_e5m2(tile, arguments, stream);
  }
  if (tile.kind == KernelKind::kSwapped) {
    return e4m3 ? transposed_e4m3(tile, arguments, stream)
                : transposed_e5m2(tile, arguments, stream);
  }
  return e4m3 ? scaled_noncontracting_e4m3(tile, arguments, stream)
              : scaled_noncontracting_e5m2(tile, arguments, stream);
}

cudaError_t scaled_contracting(TileConfig tile, ScaledArguments const& arguments,
                               cudaStream_t stream) {
  if (tile.kind == KernelKind::kStreamK) return cudaErrorInvalidConfiguration;
  return arguments.type == ElementType::kE4m3 ? scaled_contracting_e4m3(tile, arguments, stream)
                                              : scaled_contracting_e5m2(tile, arguments, stream);
}

}  // namespace jgg::fp8
