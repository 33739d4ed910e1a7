// The launch of a product in FP8 for groups of few rows.
#pragma once

#include "few_rows/launch.h"
#include "few_rows/quantized.h"
#include "scaled/views.h"

namespace jgg::few_rows {

template <class Operands, class Config = typename Operands::Config>
cudaError_t make_params(mlp::QuantizedArguments const& a, typename Operands::Params& params) {
  set_common(a, params);
  params.scales = a.scales;
  params.power_of_two = a.power_of_two;
  params.up_column = Config::kHasUp ? ceil_div(a.n, kScaleBlock) * kScaleBlock : 0;
  cudaError_t const status =
      sm90::encode_plain(&params.gate, sm90::view_bytes(a.gate_weights), a.groups.local_groups,
                         a.columns, a.k, Config::kBoxColumns);
  params.up = params.gate;
  return status;
}

}  // namespace jgg::few_rows

namespace jgg::mlp {

template <ElementType kType>
cudaError_t few_rows_quantized(TileConfig config, QuantizedArguments const& arguments,
                               cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto has_up) {
        using Element = sm90::Typed<kType>;
        using Config = few_rows::Config<Element, decltype(tile)::kTileM, has_up.value,
                                        /*kQuantizes=*/true>;
        return few_rows::launch<few_rows::QuantizedOperands<Config>>(arguments, stream);
      },
      OneTileOf<few_rows::Tiles>{config}, Flag{arguments.has_up()});
}

}  // namespace jgg::mlp
