#include "fp64/rank_k.h"

#include "fp64/tile_table.h"

namespace jgg::fp64 {

// One translation unit each, so that they compile side by side.
cudaError_t rank_k_f64(TileConfig, RankKArguments const&, cudaStream_t);
cudaError_t rank_k_c64(TileConfig, RankKArguments const&, cudaStream_t);
cudaError_t rank_k_c128(TileConfig, RankKArguments const&, cudaStream_t);

std::vector<TileConfig> rank_k_tile_configs(ElementType type) {
  switch (type) {
    case ElementType::kF64:
      return tile_configs(ShapesOf<double>::List{});
    case ElementType::kC64:
      return tile_configs(ShapesOf<Complex64>::List{});
    case ElementType::kC128:
      return tile_configs(ShapesOf<Complex128>::List{});
    default:
      return {};
  }
}

cudaError_t rank_k(TileConfig config, RankKArguments const& arguments, cudaStream_t stream) {
  switch (arguments.type) {
    case ElementType::kF64:
      return rank_k_f64(config, arguments, stream);
    case ElementType::kC64:
      return rank_k_c64(config, arguments, stream);
    case ElementType::kC128:
      return rank_k_c128(config, arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jgg::fp64
