#include "grouped/grouped_gemm.h"

#include "grouped/tile_table.h"

namespace jgg::sm90 {

// One translation unit each, so that they compile side by side.
cudaError_t grouped_gemm_bf16(TileConfig, GroupedGemmArguments const&, cudaStream_t);
cudaError_t grouped_gemm_f16(TileConfig, GroupedGemmArguments const&, cudaStream_t);

std::vector<TileConfig> const& grouped_gemm_tile_configs() {
  static std::vector<TileConfig> const configs = list(GroupedGemmTiles{});
  return configs;
}

cudaError_t grouped_gemm(TileConfig config, GroupedGemmArguments const& arguments,
                         cudaStream_t stream) {
  return arguments.type == ElementType::kBf16 ? grouped_gemm_bf16(config, arguments, stream)
                                              : grouped_gemm_f16(config, arguments, stream);
}

}  // namespace jgg::sm90
