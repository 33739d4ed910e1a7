// The products of an FP8 layer of few tokens. A product sorts the pairs of tokens and experts, and
// quantises the rows that it reads. This header does not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include "mlp/gated_ragged_dot.h"
#include "multiprocessors.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg::mlp {

// Computes out [m, n] in bfloat16 from m rows in bfloat16, which are quantised to E4M3 with a scale
// for each 1 x 128, and matrices [local_groups, n, k] in E4M3 with scales of blocks of 128. Pair i
// is of token i / choices. Row i of the result belongs to sorted pair i.
struct QuantizingArguments {
  // The tokens [m / choices, k] or, with `row_weights`, the projections [m, 2 * pitch] of sorted
  // pairs (quantized_hidden.h), from which hidden = weight activation(gate) up is computed.
  void const* rows;
  float const* row_weights;  // [m], of pairs, or null
  Activation activation;     // with `row_weights`
  int choices;
  bool power_of_two;  // scales are rounded up to powers of two
  void const* matrices;
  BlockScales scales;
  void* out;
  int* places;        // [m], receives the place of each pair among the sorted pairs; null if unused
  GroupSizes groups;  // `sizes` is not used
  Pairs pairs;        // `groups` is not null, and `are_returned` is not used
  int n;
  int k;
  int max_sms = kMostMultiprocessors;
};

cudaError_t multiply_quantizing(QuantizingArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::mlp
