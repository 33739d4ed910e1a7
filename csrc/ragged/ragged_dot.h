// The interface of the ragged products: arguments in, a launch on a stream out. This header does
// not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "multiprocessors.h"
#include "rows/gathered_rows.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg {

// The operands of both ragged products. b is the batch dimension; all batches share an operand
// without it:
//   noncontracting  lhs [b, m, k], rhs [b, local_groups, k, n], out [b, m, n]
//   contracting     lhs [b, m, k], rhs [b, m, n], out [b, local_groups, k, n]
// m is the ragged dimension, groups.rows.
struct RaggedDotArguments {
  void const* lhs;
  void const* rhs;
  void* out;
  void* workspace;
  int64_t workspace_bytes;
  ElementType type;      // of lhs and rhs
  ElementType out_type;  // `type` or kF32
  Accuracy accuracy;     // of products of float32
  bool contracting;
  bool transpose_lhs;  // the last two dimensions are exchanged
  bool transpose_rhs;
  GroupSizes groups;  // of m
  bool lhs_batched;
  bool rhs_batched;
  int k;
  int n;
  // Whether a contracting product of 16-bit operands is added to the float32 values in `out`.
  // Results of groups without rows then stay as they are.
  bool accumulate;
  GatheredRows rows;                   // of the gathered operand, if there is one
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// Both functions return kNotCompiled if there is no such kernel.
cudaError_t ragged_noncontracting(TileConfig config, RaggedDotArguments const& arguments,
                                  cudaStream_t stream);
cudaError_t ragged_contracting(TileConfig config, RaggedDotArguments const& arguments,
                               cudaStream_t stream);

}  // namespace jgg
