// The sum of two products that have the same rows and results. It is computed as one product, which
// contracts the dimension of the first product and then that of the second.
#pragma once

#include "mlp/gated_ragged_dot.h"
#include "ragged/noncontracting.h"

namespace jgg::mlp {

template <class Config_>
struct PairedProduct : sm90::RaggedNoncontracting<Config_> {
  using Config = Config_;
  using Rows = sm90::RaggedNoncontracting<Config>;

  // Parameters of the first product, but `k` covers both products.
  struct Params : Rows::Params {
    CUtensorMap second_lhs;
    CUtensorMap second_rhs;
    int second_k;  // where the second product begins: k of the first, rounded up to whole steps
  };

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    bool const first = k < params.second_k;
    loader.load(first ? params.lhs : params.second_lhs, to, box, shared,
                first ? k : k - params.second_k, sm90::kRaggedRows - work.extent + work.m + row,
                sm90::kRaggedRows, work.begin + work.extent);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    bool const first = k < params.second_k;
    loader.load(first ? params.rhs : params.second_rhs, to, box, shared,
                first ? k : k - params.second_k, work.n + column, work.group);
  }

  static cudaError_t make_params(PairedArguments const& a, Params& params) {
    static_assert(Config::kRhsMajor == Major::kK);
    RaggedDotArguments product{};
    product.groups = a.groups;
    product.out = a.out;
    product.type = product.out_type = a.type;
    product.transpose_rhs = true;
    product.k = a.k;
    product.n = a.n;
    typename Rows::Params second;
    product.lhs = a.lhs[1];
    product.rhs = a.rhs[1];
    cudaError_t status = Rows::make_params(product, second);
    if (status != cudaSuccess) return status;
    product.lhs = a.lhs[0];
    product.rhs = a.rhs[0];
    status = Rows::make_params(product, params);
    if (status != cudaSuccess) return status;

    params.second_lhs = second.lhs;
    params.second_rhs = second.rhs;
    params.second_k = ceil_div(a.k, Config::kTileK) * Config::kTileK;
    params.k = 2 * params.second_k;
    params.keeps_step = params.k / Config::kTileK >= sm90::kLockstepSteps &&
                        a.groups.rows / a.groups.groups > sm90::kLockstepRows;
    return cudaSuccess;
  }
};

}  // namespace jgg::mlp
