// The gradients of the gate's weights and of the up projection's, x^T dgate and x^T dup, as one
// product of twice the columns: coordinates of its tiles in memory.
#pragma once

#include "mlp/gated_ragged_dot.h"
#include "ragged/contracting.h"

namespace jgg::mlp {

// Columns are those of the first product, in whole tiles, and then those of the second one.
template <class Config_, bool kGathersLhs_>
struct WeightGradients : sm90::RaggedContracting<Config_, /*kAdds=*/false, kGathersLhs_> {
  using Config = Config_;
  using One = sm90::RaggedContracting<Config, /*kAdds=*/false, kGathersLhs_>;
  static_assert(!One::kMasksRows);

  struct Params : One::Params {
    CUtensorMap second_rhs;
    sm90::TwoArrays at;  // in `out`
    int second_n;        // where the second product begins
  };

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    bool const first = work.n < params.second_n;
    CUtensorMap const& rhs = first ? params.rhs : params.second_rhs;
    One::load_rhs(params, rhs, work, k, first ? column : column - params.second_n, loader, to, box,
                  shared);
  }

  __device__ static sm90::StoreCoordinates store_at(Params const& params, WorkTile const& work,
                                                    int row) {
    bool const first = work.n < params.second_n;
    return {first ? work.n : work.n - params.second_n, work.m + row,
            work.group * params.at.step + (first ? params.at.first : params.at.second)};
  }

  static cudaError_t make_params(WeightGradientArguments const& a, Params& params) {
    if ((a.rows != nullptr) != kGathersLhs_) return cudaErrorInvalidConfiguration;
    sm90::RaggedDotArguments product{};
    product.groups = a.groups;
    product.type = product.out_type = a.type;
    product.contracting = true;
    product.k = a.k;
    product.n = a.n;
    product.lhs = a.x;
    product.rows = {a.rows, a.divisor, a.tokens};
    typename One::Params second;
    product.out = a.out[0] != nullptr ? a.out[0] : a.out[1];
    product.rhs = a.rhs[1];
    cudaError_t status = One::make_params(product, second);
    if (status != cudaSuccess) return status;
    product.rhs = a.rhs[0];
    status = One::make_params(product, params);
    if (status != cudaSuccess) return status;

    params.second_rhs = second.rhs;
    params.second_n = columns(a) / 2;
    params.grid = {a.groups, a.k, columns(a), kFewRows};
    if (a.out[0] != nullptr && a.out[1] != nullptr) {
      return sm90::encode_two(&params.out, params.at, sm90::view<typename Config::Output>(a.out[0]),
                              a.out[1], a.groups.local_groups, a.k, a.n, sm90::kRowsPerConsumer);
    }
    // What lies past the last group is not stored.
    int const nowhere = a.groups.local_groups;
    bool const is_first = a.out[0] != nullptr;
    params.at = {1, is_first ? 0 : nowhere, is_first ? nowhere : 0};
    return cudaSuccess;
  }

  // Whether one descriptor can have both results.
  static bool are_near(WeightGradientArguments const& a) {
    return sm90::can_encode_two(sm90::view<typename Config::Output>(a.out[0]), a.out[1],
                                a.groups.local_groups, a.k, a.n);
  }

  static int columns(WeightGradientArguments const& a) {
    return 2 * ceil_div(a.n, Config::kTileN) * Config::kTileN;
  }
  static sm90::ResultMatrices results(WeightGradientArguments const& a) {
    auto const [first, second] = a.out;
    return sm90::result_matrices<typename Config::Output>(a.k, a.n, first ? first : second,
                                                          first ? second : nullptr);
  }

  static int64_t max_units(WeightGradientArguments const& a) {
    return int64_t(a.groups.local_groups) * ceil_div(a.k, Config::kTileM) *
           (columns(a) / Config::kTileN);
  }
};

}  // namespace jgg::mlp
