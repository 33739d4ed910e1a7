// Selects the compiled kernel for groups of few rows by the run-time arguments, and launches it.
#pragma once

#include <algorithm>

#include "few_rows/product.h"
#include "few_rows/roles.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/tma/views.h"

namespace jgg::few_rows {

// 32 rows share each read of a matrix, and a stage has 128 columns of matrices.
using Tiles = TileTable<Tile<32, 128, 1, KernelKind::kSwapped>>;

template <class Config>
cudaError_t make_params(mlp::GatedArguments const& a, Params& params) {
  using Element = typename Config::Element;
  static_cast<Product&>(params) = product_of(a);
  params.hint = sm90::LoadHint::kEvictFirst;

  auto const encode = [&](CUtensorMap& descriptor, void const* matrices) {
    sm90::TensorView view = sm90::view<Element>(matrices);
    view.fetch = sm90::kFetchBox;
    int64_t const columns = a.is_concatenated ? 2 * int64_t(a.n) : a.n;
    return sm90::encode_plain(&descriptor, view, a.groups.local_groups, a.k, columns,
                              Config::kTileK);
  };
  cudaError_t const status = encode(params.matrices, a.gate_weights);
  if (status != cudaSuccess) return status;
  bool const has_another = a.has_up() && !a.is_concatenated;
  params.second_column = has_another ? 0 : a.has_up() ? a.n : Config::kBoxColumns;
  return encode(params.second_matrices, has_another ? a.up_weights : a.gate_weights);
}

template <class Config>
cudaError_t launch(mlp::GatedArguments const& a, cudaStream_t stream) {
  Params params{};
  if (auto const status = make_params<Config>(a, params); status != cudaSuccess) return status;
  int64_t const row_tiles = ceil_div(a.groups.rows, Config::kTileM) + int64_t(a.groups.groups) + 1;
  int64_t const units =
      std::min<int64_t>(row_tiles, a.groups.rows) * ceil_div(params.columns, Config::kTileN);
  return sm90::launch_persistent<FewRowsRoles<Config>>(params, units, a.max_sms, stream,
                                                       a.pairs.follow);
}

}  // namespace jgg::few_rows

namespace jgg::mlp {

template <ElementType kType>
cudaError_t few_rows(TileConfig config, GatedArguments const& arguments, cudaStream_t stream) {
  return with_constants(
      [&](auto tile) {
        using Config = few_rows::Config<sm90::Typed<kType>, decltype(tile)::kTileM>;
        return few_rows::launch<Config>(arguments, stream);
      },
      OneTileOf<few_rows::Tiles>{config});
}

}  // namespace jgg::mlp
