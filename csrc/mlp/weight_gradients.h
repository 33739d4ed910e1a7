// The gradients of the gate's weights and of the up projection's, x^T dgate and x^T dup, as one
// product of twice the columns: coordinates of its tiles in memory. A tile may have columns of both
// results. Otherwise a tile of 256 columns would be half empty if each result had 128 columns.
#pragma once

#include "dispatch.h"
#include "mlp/gated_ragged_dot.h"
#include "ragged/contracting.h"

namespace jgg::mlp {

// Returns x^T rhs[i] as a product of its own.
inline RaggedDotArguments product_of(WeightGradientArguments const& a, int i) {
  RaggedDotArguments product{};
  product.groups = a.groups;
  product.type = product.out_type = a.type;
  product.contracting = true;
  product.k = a.k;
  product.n = a.n;
  product.lhs = a.x;
  product.rows = {a.rows, a.divisor, a.tokens};
  product.rhs = a.rhs[i];
  product.out = a.out[i];
  return product;
}

// The columns are those of the first product, in whole boxes, and then those of the second product.
template <class Config_, bool kGathersLhs_>
struct WeightGradients : sm90::RaggedContracting<Config_, /*kAdds=*/false, kGathersLhs_> {
  using Config = Config_;
  using One = sm90::RaggedContracting<Config, /*kAdds=*/false, kGathersLhs_>;
  using Epilogue = sm90::CooperativeEpilogue<Config, /*kResults=*/2>;
  static_assert(!sm90::kIsNarrow<Config>);

  struct Params : One::Params {
    sm90::TwoResults out;  // instead of One's `out`
    CUtensorMap second_rhs;
  };

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    bool const first = work.n + column < params.out.second;
    CUtensorMap const& rhs = first ? params.rhs : params.second_rhs;
    One::load_rhs(params, rhs, work, k, first ? column : column - params.out.second, loader, to,
                  box, shared);
  }

  __device__ static sm90::StoreCoordinates store_at(Params const& params, WorkTile const& work,
                                                    int row) {
    return {work.n, work.m + row, work.group};
  }

  static cudaError_t make_params(WeightGradientArguments const& a, Params& params) {
    if ((a.rows != nullptr) != kGathersLhs_) return kNotCompiled;
    typename One::Params both[2];
    for (int i = 0; i < 2; ++i) {
      cudaError_t const status = One::make_params(product_of(a, i), both[i]);
      if (status != cudaSuccess) return status;
      params.out.of[i] = both[i].out;
    }
    static_cast<typename One::Params&>(params) = both[0];
    params.second_rhs = both[1].rhs;
    params.out.second = columns(a) / 2;
    params.grid = {a.groups, a.k, columns(a), kFewRows, hot_times_mean(One::kGathersLhs)};
    return cudaSuccess;
  }

  static int columns(WeightGradientArguments const& a) {
    return 2 * ceil_div(a.n, Config::kRhsBoxColumns) * Config::kRhsBoxColumns;
  }
  static sm90::ResultMatrices results(WeightGradientArguments const& a) {
    return sm90::result_matrices<typename Config::Output>(a.k, a.n, a.out[0], a.out[1]);
  }

  static int64_t max_units(WeightGradientArguments const& a) {
    return int64_t(a.groups.local_groups) * ceil_div(a.k, Config::kTileM) *
           ceil_div(columns(a), Config::kTileN);
  }
};

// The gradient of the down projection's weights, hidden^T dy, which gathers the rows of dy [tokens,
// k]. Only rows of lhs can be gathered. So the kernel computes dy^T hidden and stores its
// transpose.
template <class Config_>
struct DownWeightGradient
    : sm90::RaggedContracting<Config_, /*kAdds=*/false, /*kGathersLhs=*/true> {
  using Config = Config_;
  using Base = sm90::RaggedContracting<Config, /*kAdds=*/false, /*kGathersLhs=*/true>;
  using Params = typename Base::Params;
  using Epilogue = sm90::CooperativeEpilogue<Config, /*kResults=*/1, /*kTransposes=*/true>;

  static cudaError_t make_params(WeightGradientArguments const& a, Params& params) {
    if (a.rows == nullptr) return kNotCompiled;
    cudaError_t const status = Base::make_params(product_of(a, 0), params);
    if (status != cudaSuccess) return status;
    return sm90::encode_plain(&params.out, sm90::view<typename Config::Output>(a.out[0]),
                              a.groups.local_groups, a.n, a.k, sm90::kRowsPerConsumer);
  }

  // A box without columns is not loaded, because TMA takes longer to fill a box with zeros than to
  // load it. The consumers then multiply old contents of shared memory, but do not store the
  // results.
  __device__ static int columns_needed(Params const& params, WorkTile const& work) {
    return params.n - work.n;
  }

  static int columns(WeightGradientArguments const& a) { return a.n; }
  static sm90::ResultMatrices results(WeightGradientArguments const& a) {
    return sm90::result_matrices<typename Config::Output>(a.n, a.k, a.out[0]);
  }
  static int64_t max_units(WeightGradientArguments const& a) {
    return int64_t(a.groups.local_groups) * ceil_div(a.k, Config::kTileM) *
           ceil_div(a.n, Config::kTileN);
  }
};

}  // namespace jgg::mlp
