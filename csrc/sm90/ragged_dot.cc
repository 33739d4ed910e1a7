#include "sm90/ragged_dot.h"

#include "sm90/stream_k/workspace.h"
#include "sm90/tile_table.h"

namespace jgg::sm90 {

// One translation unit each, so that they compile side by side.
cudaError_t ragged_noncontracting_bf16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_noncontracting_f16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_noncontracting_f32(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t few_rows_f32(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_contracting_bf16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_contracting_f16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_contracting_f32(TileConfig, RaggedDotArguments const&, cudaStream_t);

namespace stream_k {
cudaError_t ragged_noncontracting_bf16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_noncontracting_f16(TileConfig, RaggedDotArguments const&, cudaStream_t);
}  // namespace stream_k

int64_t stream_k_workspace_bytes(TileConfig config, int blocks) {
  return blocks * stream_k::Workspace::block_bytes(config.tile_m, config.tile_n);
}

std::vector<TileConfig> const& noncontracting_tile_configs() {
  static std::vector<TileConfig> const configs = list(NoncontractingTiles{});
  return configs;
}

std::vector<TileConfig> const& contracting_tile_configs() {
  static std::vector<TileConfig> const configs = list(ContractingTiles{});
  return configs;
}

cudaError_t ragged_noncontracting(TileConfig config, RaggedDotArguments const& arguments,
                                  cudaStream_t stream) {
  if (config.kind == KernelKind::kStreamK) {
    switch (arguments.type) {
      case ElementType::kBf16:
        return stream_k::ragged_noncontracting_bf16(config, arguments, stream);
      case ElementType::kF16:
        return stream_k::ragged_noncontracting_f16(config, arguments, stream);
      default:
        return cudaErrorInvalidConfiguration;
    }
  }
  switch (arguments.type) {
    case ElementType::kBf16:
      return ragged_noncontracting_bf16(config, arguments, stream);
    case ElementType::kF16:
      return ragged_noncontracting_f16(config, arguments, stream);
    case ElementType::kF32:
      return config.kind == KernelKind::kSwapped
                 ? few_rows_f32(config, arguments, stream)
                 : ragged_noncontracting_f32(config, arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t ragged_contracting(TileConfig config, RaggedDotArguments const& arguments,
                               cudaStream_t stream) {
  if (config.kind == KernelKind::kStreamK) return cudaErrorInvalidConfiguration;
  if (arguments.accumulate && arguments.type == ElementType::kF32) {
    return cudaErrorInvalidConfiguration;
  }
  switch (arguments.type) {
    case ElementType::kBf16:
      return ragged_contracting_bf16(config, arguments, stream);
    case ElementType::kF16:
      return ragged_contracting_f16(config, arguments, stream);
    case ElementType::kF32:
      return ragged_contracting_f32(config, arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jgg::sm90
