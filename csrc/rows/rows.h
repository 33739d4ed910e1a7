// The interface of the kernels that sort and move rows of a mixture-of-experts layer.
//
// A token has `choices` pairs (token, choice). A pair has at most one row of [rows, columns], which
// is its expert's copy of the token. Let f be the sum of w[t, c] <x[t], y[row of (t, c)]> over all
// pairs that have a row, with tokens x, rows y and weights w. `dispatch_rows` computes the partial
// derivative of f by y, `combine_rows` the derivative by x, and `row_dots` the derivative by w.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.h"

namespace jgg::rows {

// An operand for each batch or, with a stride of 0, one for all batches.
template <class T>
struct Batched {
  T* data = nullptr;
  int64_t stride = 0;  // elements from one batch to the next

  __device__ T* of(int batch) const { return data + batch * stride; }
  // Only the kernel knows the type of `Batched<void>`, whose stride is therefore in bytes.
  template <class Element>
  __device__ Element const* as(int batch) const {
    return reinterpret_cast<Element const*>(static_cast<char const*>(data) + batch * stride);
  }
};

// Rows at or past `count` are neither read nor written.
struct RowCount {
  Batched<int const> count;  // null: all rows
  int rows;
};

struct Pairs {
  // [tokens, choices]: the row of each pair, out of range if it has none. Null: pair i has row i
  Batched<int const> row;
  Batched<float const> weights;  // [tokens, choices], null: ones
  int tokens;
  int choices;
};

struct Shape {
  ElementType type;
  int columns;
  int batches;
};

// y[i] = w[index[i]] x[index[i] / divisor], zeros where the index is not in [0, tokens * divisor).
struct GatherArguments {
  Shape shape;
  RowCount rows;
  Batched<void const> x;         // [tokens, columns], the stride in bytes
  Batched<int const> index;      // [rows]
  Batched<float const> weights;  // [tokens, divisor], null: ones
  int tokens;
  unsigned divisor;
  void* y;  // [batches, rows, columns]
};

// y[row of (t, c)] = w[t, c] x[t]. This is the result of gather_rows(), because `gather.index` and
// `pairs.row` are inverse to each other.
struct DispatchArguments {
  GatherArguments gather;  // its weights are `pairs.weights`
  Pairs pairs;
};

// x[t] = sum of w[t, c] y[row of (t, c)], added up in float32 in the order of the choices.
struct CombineArguments {
  Shape shape;
  RowCount rows;
  Pairs pairs;
  Batched<void const> y;  // [rows, columns], the stride in bytes
  void* x;                // [batches, tokens, columns]
  bool follows = false;   // whether the previous kernel, which writes y, may still run
};

// w[t, c] = <x[t], y[row of (t, c)]> in float32, zero for a pair without a row.
struct DotsArguments {
  Shape shape;
  RowCount rows;
  Pairs pairs;            // without weights
  Batched<void const> x;  // [tokens, columns], strides in bytes
  Batched<void const> y;  // [rows, columns]
  float* weights;         // [batches, tokens, choices]
};

// A stable counting sort of pairs by the expert that each pair goes to. Pairs whose expert is
// outside [0, experts) come last and are not counted.
struct SortArguments {
  int const* expert;  // [batches, pairs]
  int* order;         // [batches, pairs], the pair at each place
  int* inverse;       // [batches, pairs], the place of each pair
  int* group_sizes;   // [batches, experts]
  int* workspace;     // [batches, blocks, experts + 1], unused if there is one block
  int batches;
  int pairs;
  int experts;
  int blocks;  // thread blocks that share the pairs of a batch
};

// The most experts for which a thread block has room for counters.
constexpr int kMostExperts = 16384;

cudaError_t gather_rows(GatherArguments const& arguments, cudaStream_t stream);
cudaError_t dispatch_rows(DispatchArguments const& arguments, cudaStream_t stream);
cudaError_t combine_rows(CombineArguments const& arguments, cudaStream_t stream);
cudaError_t row_dots(DotsArguments const& arguments, cudaStream_t stream);
// Launches one kernel if `blocks` is 1, else two kernels.
cudaError_t sort_by_expert(SortArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::rows
