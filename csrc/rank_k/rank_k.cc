#include "rank_k/rank_k.h"

#include "rank_k/tile_table.h"

namespace jgg::sm90 {

// One translation unit each, so that they compile side by side.
cudaError_t rank_k_bf16(TileConfig, RankKArguments const&, cudaStream_t);
cudaError_t rank_k_f16(TileConfig, RankKArguments const&, cudaStream_t);
cudaError_t rank_k_f32(TileConfig, RankKArguments const&, cudaStream_t);

std::vector<TileConfig> const& rank_k_tile_configs() {
  static std::vector<TileConfig> const configs = list(RankKTiles{});
  return configs;
}

cudaError_t rank_k(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  switch (arguments.type) {
    case ElementType::kBf16:
      return rank_k_bf16(config, arguments, stream);
    case ElementType::kF16:
      return rank_k_f16(config, arguments, stream);
    case ElementType::kF32:
      return rank_k_f32(config, arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jgg::sm90
