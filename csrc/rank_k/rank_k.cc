#include "rank_k/rank_k.h"

#include "rank_k/tile_table.h"

namespace jgg::sm90 {

// One translation unit each, so that they compile side by side.
cudaError_t rank_k_bf16(TileConfig, RankKArguments const&, cudaStream_t);
cudaError_t rank_k_f16(TileConfig, RankKArguments const&, cudaStream_t);

std::vector<TileConfig> const& rank_k_tile_configs() {
  static std::vector<TileConfig> const configs = list(RankKTiles{});
  return configs;
}

cudaError_t rank_k(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  return arguments.type == ElementType::kBf16 ? rank_k_bf16(config, arguments, stream)
                                              : rank_k_f16(config, arguments, stream);
}

}  // namespace jgg::sm90
