#include "sm90/ragged_dot.h"

#include "sm90/tile_table.h"

namespace jgg::sm90 {

// One translation unit each, so that they compile side by side.
cudaError_t ragged_noncontracting_bf16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_noncontracting_f16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_contracting_bf16(TileConfig, RaggedDotArguments const&, cudaStream_t);
cudaError_t ragged_contracting_f16(TileConfig, RaggedDotArguments const&, cudaStream_t);

namespace {

template <class... Tiles>
std::vector<TileConfig> list(TileTable<Tiles...>) {
  return {TileConfig{Tiles::kTileM, Tiles::kTileN, Tiles::kCluster}...};
}

}  // namespace

std::vector<TileConfig> const& tile_configs() {
  static std::vector<TileConfig> const configs = list(RaggedDotTiles{});
  return configs;
}

cudaError_t ragged_noncontracting(TileConfig config, RaggedDotArguments const& arguments,
                                  cudaStream_t stream) {
  return arguments.type == ElementType::kBf16
             ? ragged_noncontracting_bf16(config, arguments, stream)
             : ragged_noncontracting_f16(config, arguments, stream);
}

cudaError_t ragged_contracting(TileConfig config, RaggedDotArguments const& arguments,
                               cudaStream_t stream) {
  return arguments.type == ElementType::kBf16 ? ragged_contracting_bf16(config, arguments, stream)
                                              : ragged_contracting_f16(config, arguments, stream);
}

}  // namespace jgg::sm90
