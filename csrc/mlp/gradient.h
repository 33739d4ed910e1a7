// The gradient of hidden, dy times the transposed weights of the down projection: coordinates of
// its tiles in memory.
#pragma once

#include <type_traits>

#include "mlp/gated_ragged_dot.h"
#include "mlp/gradient_epilogue.h"
#include "ragged/noncontracting.h"

namespace jgg::mlp {

template <class Config_, Form kForm, bool kGathers = false>
struct GatedGradient : sm90::RaggedNoncontracting<Config_, kGathers, kGathers> {
  using Config = Config_;
  static constexpr bool kIsPlain = kForm == Form::kPlain;
  static constexpr bool kHasUp = kForm != Form::kUngated;
  using Function = std::conditional_t<kForm == Form::kPlain || kForm == Form::kGated, GatedFunction,
                                      GeneralFunction>;
  using Rows = sm90::RaggedNoncontracting<Config, kGathers, kGathers>;
  using Epilogue = GradientEpilogue<GatedGradient>;
  // The sums of a row include columns past the last one. Narrow tiles would not load these as
  // zeros.
  static_assert(!sm90::kIsNarrow<Config>);

  struct Params : Rows::Params {
    CUtensorMap dgate;
    CUtensorMap dup;
    CUtensorMap hidden;
    CUtensorMap gate;
    CUtensorMap up;
    float const* weights;
    float* dweights;
    Function activation;
    int columns;
    int rows;
  };

  static cudaError_t make_params(GradientArguments const& a, Params& params) {
    using Output = typename Config::Output;
    if ((a.rows != nullptr) != kGathers) return kNotCompiled;
    RaggedDotArguments product{};
    product.lhs = a.dy;
    product.rows = {a.rows, a.divisor, a.tokens};
    product.rhs = a.down_weights;
    product.groups = a.groups;
    product.out = a.hidden;
    product.type = product.out_type = a.type;
    product.transpose_rhs = true;
    product.k = a.k;
    product.n = a.n;
    cudaError_t status = Rows::make_params(product, params);
    if (status != cudaSuccess) return status;

    params.weights = a.weights;
    params.dweights = a.dweights;
    params.activation = Function(a.activation);
    params.columns = a.n;
    params.rows = a.groups.rows;
    CUtensorMap* const maps[] = {&params.dgate, &params.dup, &params.hidden};
    void* const results[] = {a.dgate, a.dup, a.hidden};
    for (int i = 0; i < 3; ++i) {
      if (results[i] == nullptr) continue;
      sm90::TensorView view = sm90::view<Output>(results[i]);
      view.box_bytes = Epilogue::kSubtileRowBytes;
      status = sm90::encode_ragged_store(maps[i], view, a.n, kRowsPerConsumer, params.store_shift);
      if (status != cudaSuccess) return status;
    }
    CUtensorMap* const loads[] = {&params.gate, &params.up};
    void const* const operands[] = {a.gate, a.up};
    for (int i = 0; i < (kHasUp ? 2 : 1); ++i) {
      sm90::TensorView view = sm90::view<Output>(operands[i]);
      view.fetch = sm90::kFetchBox;
      view.box_bytes = Epilogue::kSubtileRowBytes;
      status = sm90::encode_ragged_load(loads[i], view, a.n, kRowsPerConsumer);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }
};

}  // namespace jgg::mlp
