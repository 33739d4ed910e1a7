// What the bindings see of the products for groups of few rows: arguments in, a launch on a stream
// out. No CUTLASS here.
//
// With so few rows a product takes as long as reading its weights once. Each kernel does all that
// comes before and after on the way, so that nothing else is launched: rows are read where their
// tokens are, and biases, activation and the weights of rows are applied to the sums.
#pragma once

#include <cuda_runtime.h>

#include "mlp/gated_ragged_dot.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg::few_rows {

// out [m, n] of x [tokens, k] and matrices [local_groups, k, n]: with an activation
//
//   out = weight activation(x gate + gate_bias) (x up + up_bias)
//
// where up may be missing, and without one
//
//   out = x gate + weight gate_bias.
struct Arguments {
  void const* x;
  // [m], `divisor` times the token of each row, or up to that less than the next; not of a token if
  // out of range. Null: row i is token i.
  int const* rows;
  int divisor;
  int tokens;
  void const* gate;
  void const* up;         // null if there is none, or if
  bool is_concatenated;   // gate is [local_groups, k, 2 n], and up its second half of columns
  void const* gate_bias;  // [local_groups, n], null for zeros; of `type`, or
  bool gate_bias_is_float32;
  void const* up_bias;  // likewise
  bool up_bias_is_float32;
  float const* weights;   // [m], null for ones; or
  bool weights_of_pairs;  // [tokens, divisor], that of row i at rows[i]
  void* out;
  void* kept_gate;  // [m, n], null if neither gate nor up is wanted
  void* kept_up;    // null without up
  ElementType type;
  bool has_activation;
  mlp::Activation activation;
  GroupSizes groups;  // of m
  int k;
  int n;
};

// `config.tile_m` is how many rows are multiplied by a matrix that is read once; see tiles.h.
// cudaErrorInvalidConfiguration if there is no such kernel.
cudaError_t few_rows_dot(TileConfig config, Arguments const& arguments, cudaStream_t stream);

}  // namespace jgg::few_rows
