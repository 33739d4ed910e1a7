#include "grouped/grouped_gemm.h"

#include "grouped/tile_table.h"

namespace jgg::sm90 {

// One translation unit each, so that they compile side by side.
cudaError_t grouped_gemm_bf16(TileConfig, GroupedGemmArguments const&, cudaStream_t);
cudaError_t grouped_gemm_f16(TileConfig, GroupedGemmArguments const&, cudaStream_t);
cudaError_t grouped_gemm_f32(TileConfig, GroupedGemmArguments const&, cudaStream_t);

std::vector<TileConfig> const& grouped_gemm_tile_configs() {
  static std::vector<TileConfig> const configs = list(GroupedGemmTiles{});
  return configs;
}

cudaError_t grouped_gemm(TileConfig config, GroupedGemmArguments const& arguments,
                         cudaStream_t stream) {
  switch (arguments.type) {
    case ElementType::kBf16:
      return grouped_gemm_bf16(config, arguments, stream);
    case ElementType::kF16:
      return grouped_gemm_f16(config, arguments, stream);
    case ElementType::kF32:
      return grouped_gemm_f32(config, arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jgg::sm90
