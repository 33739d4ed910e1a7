// The first kernel of an FP8 layer of few tokens: it sorts pairs of a token and an expert, and
// quantises their tokens. This header does not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mlp/gated_ragged_dot.h"

namespace jgg::mlp {

// Pair i is of token i / choices of x [tokens, columns], in bfloat16, and of the expert
// group_of[i]. Pairs are sorted by expert, and pairs of one expert by their numbers. Pairs outside
// [0, groups) come last and are not counted. `columns` is a multiple of 8.
struct SortedRows {
  void const* x;
  int const* group_of;   // [pairs]
  float const* weights;  // [pairs]
  int pairs;             // at most Pairs::kMost
  int choices;
  int groups;  // at most Pairs::kMostGroups
  int columns;
  bool power_of_two;   // scales are rounded up to powers of two
  uint8_t* q;          // [pairs, columns]: the token of each sorted pair, in E4M3
  float* scale;        // [pairs, ceil(columns / 128)]
  float* row_weights;  // [pairs]: the weight of each sorted pair
  int* places;         // [pairs]: the place of each pair among the sorted pairs
  int* sizes;          // [groups]: the number of pairs of each group
};

cudaError_t quantize_sorted(SortedRows const& arguments, cudaStream_t stream);

}  // namespace jgg::mlp
