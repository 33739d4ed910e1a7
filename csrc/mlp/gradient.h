// The gradient of hidden, dy times the transposed weights of the down projection: coordinates of
// its tiles in memory.
#pragma once

#include "mlp/gated_ragged_dot.h"
#include "mlp/gradient_epilogue.h"
#include "sm90/ragged_noncontracting.h"

namespace jgg::mlp {

template <class Config_>
struct GatedGradient : sm90::RaggedNoncontracting<Config_> {
  using Config = Config_;
  using Rows = sm90::RaggedNoncontracting<Config>;
  using Epilogue = GradientEpilogue<GatedGradient>;
  static_assert(!Rows::kHasHeads);

  struct Params : Rows::Params {
    CUtensorMap dgate;
    CUtensorMap dup;
    CUtensorMap hidden;
    void const* gate;
    void const* up;
    float const* weights;
    float* dweights;
    Activation activation;
    int columns;
    int rows;
  };

  static cudaError_t make_params(GatedGradientArguments const& a, Params& params) {
    using Output = typename Config::Output;
    sm90::RaggedDotArguments product{};
    product.lhs = a.dy;
    product.rhs = a.down_weights;
    product.group_sizes = a.group_sizes;
    product.group_offset = a.group_offset;
    product.out = a.hidden;
    product.type = product.out_type = a.type;
    product.transpose_rhs = true;
    product.batches = 1;
    product.groups = a.groups;
    product.local_groups = a.local_groups;
    product.m = a.m;
    product.k = a.k;
    product.n = a.n;
    cudaError_t status = Rows::make_params(product, params);
    if (status != cudaSuccess) return status;

    params.gate = a.gate;
    params.up = a.up;
    params.weights = a.weights;
    params.dweights = a.dweights;
    params.activation = a.activation;
    params.columns = a.n;
    params.rows = a.m;
    CUtensorMap* const maps[] = {&params.dgate, &params.dup, &params.hidden};
    void* const results[] = {a.dgate, a.dup, a.hidden};
    for (int i = 0; i < 3; ++i) {
      sm90::TensorView view = sm90::view<Output>(results[i]);
      view.box_bytes = Epilogue::kChunkRowBytes;
      status = sm90::encode_ragged_store(maps[i], view, a.n, kRowsPerConsumer, params.store_shift);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }

  static int64_t max_units(GatedGradientArguments const& a) {
    int64_t const row_tiles = ceil_div(a.m, Config::kTileM) + int64_t(a.groups);
    return row_tiles * ceil_div(a.n, Config::kTileN);
  }
};

}  // namespace jgg::mlp
