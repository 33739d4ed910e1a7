// The interface of the kernels of an expert MLP: arguments in, a launch on a stream out. This
// header does not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include "multiprocessors.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg::mlp {

// The function of the gate. kSigmoid is g sigmoid(alpha g (1 + cubic g^2)), which includes silu and
// the tanh form of gelu. kGelu is g Phi(g).
enum class Function : int { kSigmoid, kGelu, kRelu, kSquaredRelu };

// hidden = function(g) (u + shift), with g = min(gate, limit) and u = up clamped to +-limit. hidden
// is zero where gate is zero.
struct Activation {
  float alpha;
  float cubic;
  float limit;
  float shift;
  Function function = Function::kSigmoid;
};

// Biases [local_groups, n], of the type of the matrices or float32. Null stands for zeros.
struct Bias {
  void const* data = nullptr;
  bool is_float32 = false;
};

// The pairs of a token and one of its `divisor` choices, for a layer of few tokens. Kernels of such
// a layer sort the pairs by expert themselves. Each thread block sorts all pairs, so that no kernel
// waits for a sort.
struct Pairs {
  static constexpr int kMost = 128, kMostGroups = 512;

  // [m], the group of each pair, which replaces the sizes of groups and `rows`. Pairs outside of
  // all groups come last. Null if rows are already sorted.
  int const* groups = nullptr;
  // If true, row i of x belongs to sorted pair i, and the results are in the order of the pairs. If
  // false, x has tokens, and row i of the results belongs to sorted pair i.
  bool are_returned = false;
  // Whether the previous kernel of the stream, which writes x, may still run when this kernel
  // begins.
  bool follow = false;
};

// Computes hidden [m, n] from x [tokens, k] and weights [local_groups, k, n]. With an activation,
// hidden is
//
//   hidden = weight activation(x gate_weights + gate_bias) (x up_weights + up_bias)
//
// where the factor of up may be missing. Without an activation, hidden is
//
//   hidden = x gate_weights + weight gate_bias.
struct GatedArguments {
  void const* x;
  // [m]. The token of row i is rows[i] / divisor. If this token is out of range, the row has no
  // token. Null: row i is token i.
  int const* rows;
  int divisor;
  int tokens;
  void const* gate_weights;
  void const* up_weights;  // null if there is no up, or if `is_concatenated`
  bool is_concatenated;    // whether gate_weights are [local_groups, k, 2 n], of gate and up
  Bias gate_bias;
  Bias up_bias;
  float const* weights;   // [m] or [tokens, divisor]. Null for ones
  bool weights_of_pairs;  // whether weights are [tokens, divisor]. Row i has weights[rows[i]]
  void* hidden;
  void* gate;  // null if neither gate nor up is wanted
  void* up;    // null also if there is no up
  ElementType type;
  bool has_activation;
  Activation activation;
  GroupSizes groups;  // of m rows
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
  Pairs pairs;

  bool has_up() const { return up_weights != nullptr || is_concatenated; }
};

// Computes the gradients of gate, of up (if there is one) and of each row's weight, and also
// computes hidden again. The gradients follow from the gradient of hidden, which is dh = dy
// down_weights^T, with dy [tokens, k] and down_weights [local_groups, n, k]. Results are [m, n],
// except `dweights`, which is [ceil(n / tile_n), m] and has one sum for each tile of columns.
struct GradientArguments {
  void const* dy;
  int const* rows;  // as in GatedArguments
  int divisor;
  int tokens;
  void const* down_weights;
  void const* gate;
  void const* up;        // null if there is none; then so is its gradient
  float const* weights;  // [m], null for ones
  void* dgate;
  void* dup;
  void* hidden;
  float* dweights;
  ElementType type;
  Activation activation;
  GroupSizes groups;  // of m rows
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// Computes out[i] [local_groups, k, n] = x^T rhs[i] over the rows of each group, with x [tokens, k]
// and rhs [m, n]. Without a second rhs, out[0] [local_groups, n, k] = rhs[0]^T x.
struct WeightGradientArguments {
  void const* x;
  int const* rows;  // as in GatedArguments
  int divisor;
  int tokens;
  void const* rhs[2];
  void* out[2];
  void* workspace;
  int64_t workspace_bytes;
  ElementType type;
  GroupSizes groups;  // of m rows
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// out [m, n] = lhs[0] rhs[0]^T + lhs[1] rhs[1]^T, with lhs [m, k] and rhs [local_groups, n, k].
struct PairedArguments {
  void const* lhs[2];
  void const* rhs[2];
  void* out;
  ElementType type;
  GroupSizes groups;  // of m rows
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// These functions return kNotCompiled if there is no such kernel. Kernels for groups of few rows
// (kSwapped) take all arguments. activated_ragged_dot() takes biases, products without up and
// functions other than kSigmoid, but no `rows`.
cudaError_t gated_ragged_dot(TileConfig config, GatedArguments const& arguments,
                             cudaStream_t stream);
cudaError_t activated_ragged_dot(TileConfig config, GatedArguments const& arguments,
                                 cudaStream_t stream);
cudaError_t gated_gradient(TileConfig config, GradientArguments const& arguments,
                           cudaStream_t stream);
cudaError_t paired_ragged_dot(TileConfig config, PairedArguments const& arguments,
                              cudaStream_t stream);
cudaError_t weight_gradients(TileConfig config, WeightGradientArguments const& arguments,
                             cudaStream_t stream);

}  // namespace jgg::mlp
