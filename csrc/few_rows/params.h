// The parameters of the kernel for groups of few rows.
#pragma once

#include <cuda.h>

#include "mlp/activation.h"
#include "mlp/gated_ragged_dot.h"
#include "scheduler/work_tile.h"
#include "sm90/tma/load.h"

namespace jgg::few_rows {

// All but the matrices.
struct Product {
  char const* x;
  int const* rows;
  unsigned divisor;
  int tokens;
  mlp::Bias gate_bias;
  mlp::Bias up_bias;
  float const* weights;
  bool weights_of_pairs;
  void* out;
  void* kept_gate;
  void* kept_up;
  bool has_activation;
  bool has_up;  // whether sums are of gate and up
  mlp::GeneralFunction activation;
  GroupSizes groups;
  int k;
  int n;
  int columns;  // of gate and of up
  mlp::Pairs pairs;

  // `order` has the pairs of rows if the kernel sorts them, which it can with `kSorts`.
  template <bool kSorts>
  __device__ unsigned pair(int row, int const* order) const {
    return kSorts && pairs.groups ? order[row] : __ldg(rows + row);
  }

  // The token of a row, which may be out of range.
  template <bool kSorts>
  __device__ unsigned token(int row, int const* order) const {
    bool const has_tokens = kSorts && pairs.groups ? !pairs.are_returned : rows != nullptr;
    return has_tokens ? pair<kSorts>(row, order) / divisor : row;
  }

  // The weight of a row that may have no token: whatever it is, zeros are multiplied by it.
  template <bool kSorts>
  __device__ float weight(int row, int const* order) const {
    if (weights == nullptr) return 1.0f;
    if (!weights_of_pairs) return __ldg(weights + row);
    unsigned const at = pair<kSorts>(row, order);
    return at / divisor < unsigned(tokens) ? __ldg(weights + at) : 0.0f;
  }

  // Where a row is in the results.
  template <bool kSorts>
  __device__ int64_t result_row(int row, int const* order) const {
    return kSorts && pairs.are_returned ? order[row] : row;
  }
};

// Whether sums are of gate and up. Kernels without `Config::kHasUp` do both kinds of products: the
// two products of a layer then fetch the code of one kernel. Their tiles and `WorkTile::n` count
// columns of gate and of up.
template <class Config>
__device__ bool has_up(Product const& params) {
  if constexpr (requires { Config::kHasUp; }) return Config::kHasUp;
  return params.has_up;
}
template <class Config>
__device__ int first_column(Product const& params, WorkTile const& work) {
  if constexpr (requires { Config::kHasUp; }) return work.n;
  return params.has_up ? work.n / 2 : work.n;
}
// Columns of the result of a tile.
template <class Config>
__device__ int tile_columns(Product const& params) {
  if constexpr (requires { Config::kHasUp; }) return Config::kTileN;
  return params.has_up ? Config::kTileN / 2 : Config::kTileN;
}

struct Params : Product {
  CUtensorMap matrices;  // of gate, if there is one
  // A stage's second half has columns of up, or further columns of the same matrices.
  CUtensorMap second_matrices;
  int second_column;  // less the column of the first half
  sm90::LoadHint hint;
};

}  // namespace jgg::few_rows
