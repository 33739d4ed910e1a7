// The products of an FP8 layer of few tokens. Each thread block sorts the pairs of tokens and
// experts, and quantises the rows that it reads. This header does not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include "mlp/gated_ragged_dot.h"
#include "multiprocessors.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg::mlp {

// Computes out [m, n] in bfloat16 from m rows [m, k] and matrices [local_groups, n, k]. The rows
// are read in bfloat16, and quantised to E4M3 with a scale for each 1 x 128. The matrices are in
// E4M3 with a scale for each 128 x 128. Pair i is of token i / choices. Row i of the result belongs
// to sorted pair i, and is zero if no local group owns the pair. Rows in memory are a multiple of
// 16 bytes.
struct QuantizingArguments {
  // The tokens [m / choices, k] or, with `row_weights`, the projections [m, 2 * pitch] of sorted
  // pairs (quantized_hidden.h), from which hidden = weight activation(gate) up is computed.
  void const* rows;
  float const* row_weights;  // [m], of pairs in their own order, or null
  Activation activation;     // of kSigmoid; unused without `row_weights`
  int choices;
  bool power_of_two;  // scales are rounded up to powers of two
  void const* matrices;
  BlockScales scales;
  void* out;
  // [m], receives the place of each pair among the sorted pairs. Null if `follows`, because places
  // are written before this kernel waits for the previous one.
  int* places;
  int const* pair_groups;  // [m], the group of each pair
  GroupSizes groups;       // `sizes` and the strides are not used, and there is one batch
  // Whether the previous kernel of the stream, which may write `rows` and nothing else that this
  // kernel reads, may still run when this kernel begins.
  bool follows;
  int n;
  int k;
  int max_sms = kMostMultiprocessors;
};

cudaError_t multiply_quantizing(QuantizingArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::mlp
