// The parameters of the kernel for groups of few rows.
#pragma once

#include <cuda.h>

#include "mlp/activation.h"
#include "mlp/gated_ragged_dot.h"
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
  mlp::GeneralFunction activation;
  GroupSizes groups;
  int k;
  int n;

  // The token of a row, which may be out of range.
  __device__ unsigned token(int row) const {
    return rows ? static_cast<unsigned>(__ldg(rows + row)) / divisor : row;
  }

  // The weight of a row that may have no token: whatever it is, zeros are multiplied by it.
  __device__ float weight(int row) const {
    if (weights == nullptr) return 1.0f;
    if (!weights_of_pairs) return __ldg(weights + row);
    auto const pair = static_cast<unsigned>(__ldg(rows + row));
    return pair / divisor < unsigned(tokens) ? __ldg(weights + pair) : 0.0f;
  }
};

struct Params : Product {
  CUtensorMap gate;
  CUtensorMap up;
  sm90::LoadHint hint;
  int up_column;  // of `up`, the first
};

}  // namespace jgg::few_rows
