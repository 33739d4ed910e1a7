// The interface of the FP8 products: arguments in, a launch on a stream out. This header does not
// include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "multiprocessors.h"
#include "rows/gathered_rows.h"
#include "scheduler/group_sizes.h"
#include "types.h"

namespace jgg {

// The operands, which are contiguous along the contracted dimension. b is the batch dimension; all
// batches share an operand without it:
//   noncontracting  lhs [b, m, k], rhs [b, local_groups, n, k], out [b, m, n]
//   contracting     lhs [b, k / 128, m, 128], rhs [b, k / 128, n, 128], out [b, local_groups, m, n]
// In the contracting product, k is the ragged dimension. Each group starts at the start of a block
// of 128, and its last block is padded with zeros.
struct ScaledArguments {
  void const* lhs;
  void const* rhs;
  void* out;
  ElementType type;  // of lhs
  ElementType rhs_type;
  ElementType out_type;
  RowScales lhs_scales;
  BlockScales rhs_scales;  // noncontracting; no data means ones
  // noncontracting: [b, local_groups, n] or none; contracting with the same scales for all blocks:
  // [b, n]
  float const* channel_scales;
  int64_t channel_batch_stride;
  float const* column_scales;  // contracting: [b, k / 128, n]
  void* workspace;             // of stream-K kernels
  int64_t workspace_bytes;
  GroupSizes groups;
  GatheredRows rows;  // of lhs [rows.tokens, k] and its scales: gathered_scaled_noncontracting
  bool lhs_batched;
  bool rhs_batched;
  int m;
  int n;
  int k;
  // paired_scaled_contracting: the operands of a second product with the same rhs
  void const* second_lhs;
  RowScales second_lhs_scales;
  void* second_out;
  bool transposes_out;     // contracting with channel_scales: out [b, local_groups, n, m]
  bool fast_accumulation;  // channel_scaled_noncontracting: only the tensor cores add
  int max_sms = kMostMultiprocessors;  // how many multiprocessors the launch fills at most
};

// All functions return kNotCompiled if there is no such kernel.
cudaError_t scaled_ragged_noncontracting(TileConfig tile, ScaledArguments const& arguments,
                                         cudaStream_t stream);
// Multiplies operands whose scales do not change along K. `lhs_scales` are the same for all steps.
// rhs has `channel_scales` [b, local_groups, n], or `rhs_scales` with one scale for each matrix.
cudaError_t channel_scaled_noncontracting(TileConfig tile, ScaledArguments const& arguments,
                                          cudaStream_t stream);
// Takes `rows`, no batch dimension, and block scales for which k / 128 is a multiple of four.
cudaError_t gathered_scaled_noncontracting(TileConfig tile, ScaledArguments const& arguments,
                                           cudaStream_t stream);
cudaError_t scaled_ragged_contracting(TileConfig tile, ScaledArguments const& arguments,
                                      cudaStream_t stream);
// Takes `channel_scales` instead of `column_scales`.
cudaError_t channel_scaled_contracting(TileConfig tile, ScaledArguments const& arguments,
                                       cudaStream_t stream);
// Launches two channel-scaled contracting products as one kernel. The results have 16 bits and are
// transposed.
cudaError_t paired_scaled_contracting(TileConfig tile, ScaledArguments const& arguments,
                                      cudaStream_t stream);

}  // namespace jgg
