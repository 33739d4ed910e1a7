// What the bindings see of the FP8 kernels: arguments in, a launch on a stream out. No CUTLASS
// here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "scheduler/segment_cursor.h"

namespace jgg::fp8 {

enum class Fp8Type { kE4M3, kE5M2 };
enum class OutType { kBf16, kF16, kF32 };

// Scales of the kept dimension of lhs: element [batch, row, block] is at the sum of each index
// times its stride. Coarser scales have a stride of zero.
struct RowScales {
  float const* data;
  int64_t batch_stride;
  int row_stride;
  int block_stride;  // a block is 128 elements of the contracted dimension
};

// Scales of a stack of matrices in blocks of 128 columns by 128 of the contracted dimension.
struct BlockScales {
  float const* data;
  int64_t batch_stride;
  int64_t group_stride;
  int column_block_stride;
  int block_stride;
};

// With b the batch dimension that each operand may have or share, and every operand contiguous
// along the contracted dimension:
//   noncontracting  lhs [b, m, k], rhs [b, local_groups, n, k], out [b, m, n]
//   contracting     lhs [b, k / 128, m, 128], rhs [b, k / 128, n, 128], out [b, local_groups, m, n]
// In the second, k is the ragged dimension: each block of 128 is of one group, which starts at a
// block's start, and zeros fill up its last one.
struct ScaledArguments {
  void const* lhs;
  void const* rhs;
  void* out;
  Fp8Type lhs_type;
  Fp8Type rhs_type;
  OutType out_type;
  RowScales lhs_scales;
  BlockScales rhs_scales;       // noncontracting; no data means ones
  float const* channel_scales;  // noncontracting: [b, local_groups, n] or none
  int64_t channel_batch_stride;
  float const* column_scales;  // contracting: [b, k / 128, n]
  void* workspace;             // of kernels that cut the last wave
  int64_t workspace_bytes;
  GroupSizes groups;
  bool lhs_batched;
  bool rhs_batched;
  int m;
  int n;
  int k;
};

struct ScaledTile {
  int tile_m;
  int tile_n;
  int cluster;
  bool stream_k = false;  // the last wave is cut along K: noncontracting products
};

// Tiles of fewer rows than a WGMMA instruction has belong to kernels for groups of few rows, in
// which rows are on the other side of the instruction.
constexpr bool is_transposed(ScaledTile tile) { return tile.tile_m < 64; }

// cudaErrorInvalidConfiguration if there is no such kernel.
cudaError_t scaled_noncontracting(ScaledTile tile, ScaledArguments const& arguments,
                                  cudaStream_t stream);
cudaError_t scaled_contracting(ScaledTile tile, ScaledArguments const& arguments,
                               cudaStream_t stream);

}  // namespace jgg::fp8
