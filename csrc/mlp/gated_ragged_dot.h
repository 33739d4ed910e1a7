// The interface of the kernels of an expert MLP: arguments in, a launch on a stream out. No CUTLASS
// here.
#pragma once

#include <cuda_runtime.h>

#include "multiprocessors.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg::mlp {

// The function of the gate: g sigmoid(alpha g (1 + cubic g^2)), which silu and the tanh form of
// gelu are; gelu, g Phi(g); relu, or its square.
enum class Function : int { kSigmoid, kGelu, kRelu, kSquaredRelu };

// hidden = function(g) (u + shift), of g = min(gate, limit) and u = up clamped to +-limit. Zero
// where gate is.
struct Activation {
  float alpha;
  float cubic;
  float limit;
  float shift;
  Function function = Function::kSigmoid;
};

// [local_groups, n], of the type of the matrices or of float32; null for zeros.
struct Bias {
  void const* data = nullptr;
  bool is_float32 = false;
};

// For a layer of few tokens, whose kernels sort the pairs of a token and one of its `divisor`
// choices by expert themselves. Each block sorts them again, so that nothing waits for a sort.
struct Pairs {
  static constexpr int kMost = 128, kMostGroups = 512;

  // [m], the group of each pair, instead of sizes of groups and of `rows`. A pair outside of all
  // groups comes last. Null: rows are sorted.
  int const* groups = nullptr;
  // Whether x has the sorted rows and results are in the order of the pairs. If not, row i is of
  // the token of sorted pair i.
  bool are_returned = false;
  // Whether the kernel before this one in the stream, which writes x, may still run when it begins.
  bool follow = false;
};

// hidden [m, n] of x [tokens, k] and weights [local_groups, k, n]: with an activation
//
//   hidden = weight activation(x gate_weights + gate_bias) (x up_weights + up_bias)
//
// where the factor of up may be missing, and without one
//
//   hidden = x gate_weights + weight gate_bias.
struct GatedArguments {
  void const* x;
  // [m], `divisor` times the token of each row, or up to that less than the next; not of a token if
  // out of range. Null: row i is token i.
  int const* rows;
  int divisor;
  int tokens;
  void const* gate_weights;
  void const* up_weights;  // null if there are none, or if
  bool is_concatenated;    // gate_weights are [local_groups, k, 2 n], of gate and up
  Bias gate_bias;
  Bias up_bias;
  float const* weights;   // [m], null for ones; or
  bool weights_of_pairs;  // [tokens, divisor], that of row i at rows[i]
  void* hidden;
  void* gate;  // null if neither gate nor up is wanted
  void* up;    // null if there is none, too
  ElementType type;
  bool has_activation;
  Activation activation;
  GroupSizes groups;  // of m
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
  Pairs pairs;

  bool has_up() const { return up_weights != nullptr || is_concatenated; }
};

// The gradients of the above, from dy [tokens, k] and the weights [local_groups, n, k] that hidden
// was multiplied by: dh = dy weights^T, and from it those of gate and up, if there is an up, and
// that of a row's weight as one sum for each of the tile's columns. Results are [m, n] and [ceil(n
// / tile_n), m].
struct GradientArguments {
  void const* dy;
  int const* rows;  // those of GatedArguments
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
  GroupSizes groups;  // of m
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// out[i] [local_groups, k, n] = x^T rhs[i] of the rows of each group, with x [tokens, k] and rhs
// [m, n]. Without a second rhs, out[0] [local_groups, n, k] = rhs[0]^T x.
struct WeightGradientArguments {
  void const* x;
  int const* rows;  // those of GatedArguments
  int divisor;
  int tokens;
  void const* rhs[2];
  void* out[2];
  void* workspace;
  int64_t workspace_bytes;
  ElementType type;
  GroupSizes groups;  // of m
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
  GroupSizes groups;  // of m
  int k;
  int n;
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// kNotCompiled if there is no such kernel. Kernels for groups of few rows (kSwapped) take all
// arguments. The kernels of activated_ragged_dot take biases, no up, or another function than a
// sigmoid, but no `rows`.
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
