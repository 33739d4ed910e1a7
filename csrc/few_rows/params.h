// The parameters of the kernel for groups of few rows.
#pragma once

#include <cuda.h>

#include "mlp/activation.h"
#include "mlp/gated_ragged_dot.h"
#include "scheduler/work_tile.h"
#include "sm90/tma/load.h"

namespace jgg::few_rows {

// All parameters except the matrices.
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
  int columns;  // of gate and up together
  mlp::Pairs pairs;

  // Returns the pair of a row. If the kernel sorts pairs, `order` has the pair of each row. Only
  // kernels with `kSorts` can sort.
  template <bool kSorts>
  __device__ unsigned pair(int row, int const* order) const {
    return kSorts && pairs.groups ? order[row] : __ldg(rows + row);
  }

  // Returns the token of a row, which may be out of range.
  template <bool kSorts>
  __device__ unsigned token(int row, int const* order) const {
    bool const has_tokens = kSorts && pairs.groups ? !pairs.are_returned : rows != nullptr;
    return has_tokens ? pair<kSorts>(row, order) / divisor : row;
  }

  // Returns the weight of a row. If weights are of pairs, a row without a token has weight 0.
  template <bool kSorts>
  __device__ float weight(int row, int const* order) const {
    if (weights == nullptr) return 1.0f;
    if (!weights_of_pairs) return __ldg(weights + row);
    unsigned const at = pair<kSorts>(row, order);
    return at / divisor < unsigned(tokens) ? __ldg(weights + at) : 0.0f;
  }

  // Returns the place of a row in the results.
  template <bool kSorts>
  __device__ int64_t result_row(int row, int const* order) const {
    return kSorts && pairs.are_returned ? order[row] : row;
  }
};

// Returns whether sums are of gate and up. A kernel without `Config::kHasUp` computes products with
// up and products without up, so that the two products of a layer fetch the code of only one
// kernel. In such a kernel, tiles and `WorkTile::n` count the columns of gate and up together.
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
// Returns the number of a tile's columns in the result.
template <class Config>
__device__ int tile_columns(Product const& params) {
  if constexpr (requires { Config::kHasUp; }) return Config::kTileN;
  return params.has_up ? Config::kTileN / 2 : Config::kTileN;
}

struct Params : Product {
  CUtensorMap matrices;  // of gate, or the only matrices
  // A stage's second half has columns of up, or further columns of the same matrices.
  CUtensorMap second_matrices;
  int second_column;  // relative to the column of the first half
  sm90::LoadHint hint;
};

}  // namespace jgg::few_rows
