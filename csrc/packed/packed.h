// The interface of the products of 16-bit rows and packed matrices of 4 or 8 bits. This header does
// not include CUTLASS.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mlp/gated_ragged_dot.h"

namespace jgg::packed {

// How matrices are quantised and packed: jax_grouped_gemm/_src/quantized/pack.py says which bit is
// where. kInt4Zeros is int4 with zero points. Without them the zero point is 8, and kernels need
// fewer instructions.
enum class Format : int { kMxFp4, kInt4, kInt4Zeros, kInt8, kFp8, kFp8Blocks };

// A record has 64 columns by 64 elements of K.
constexpr int kSide = 64;

constexpr bool is_int4(Format format) {
  return format == Format::kInt4 || format == Format::kInt4Zeros;
}
constexpr int bits_of(Format format) { return format == Format::kMxFp4 || is_int4(format) ? 4 : 8; }
constexpr int record_bytes(Format format) { return kSide * kSide * bits_of(format) / 8; }

// A stack of matrices [matrices, k, n], in records [matrices, ceil(n / 64), ceil(k / 64)].
struct Matrices {
  // [matrices, ceil(n / 64), ceil(k / 64), 2048 or 4096]
  uint8_t const* values = nullptr;
  // MXFP4: exponents of groups of 32, [matrices, ceil(n / 64), ceil(k / 64), 128]. int4: bfloat16
  // [matrices, ceil(n / 64), groups, 64]. FP8 in blocks: a `BlockScale` for each record.
  uint8_t const* scales = nullptr;
  // int4 with zero points: [matrices, ceil(n / 64), groups, 64]. Otherwise null
  uint8_t const* zero_points = nullptr;
  // [matrices, 64 ceil(n / 64)], null for int4
  float const* channel_scales = nullptr;
};

// Returns the format that kernels are compiled for.
constexpr Format compiled_format(Format format, Matrices const& matrices) {
  return format == Format::kInt4 && matrices.zero_points ? Format::kInt4Zeros : format;
}

// The scale of a record of FP8 in blocks. The sum of `high` and `low`, which are two numbers of
// bfloat16, is 2^120 times the scale over the channel scale.
struct alignas(16) BlockScale {
  float scale;
  float high;
  float low;
  float unused;
};
static_assert(sizeof(BlockScale) == 4 * sizeof(float));

// The rows of a tile in decoded_dot().
constexpr int kFewRows = 32;
constexpr int kManyRows = 128;
constexpr int kTallRows = 256;
// Two thread blocks with tiles of few rows share a multiprocessor. With FP8 in blocks they would
// spill registers.
constexpr bool has_tiles_of_few_rows(Format format) { return format != Format::kFp8Blocks; }
// Whether gate and up have tiles of kTallRows rows, which read consecutive rows of x.
constexpr bool has_tall_tiles(Format format) {
  return format == Format::kMxFp4 || format == Format::kFp8Blocks;
}

// The matrices of `product` are not used. `gate` and `up` replace them.
struct Arguments {
  mlp::GatedArguments product;
  Format format;
  int group_size;  // int4: 32, 64 or 128 elements along K share a scale
  Matrices gate;
  Matrices up;  // `values` are null if there is no up
  // decoded_dot() takes kManyRows in any case, kFewRows if has_tiles_of_few_rows(), and kTallRows
  // if has_tall_tiles(), there is an up, and product.rows is null.
  int tile_m;
  // Receives the partial sums of streamed_dot().
  void* workspace;
  int64_t workspace_bytes;
};

// The bytes of workspace that a thread block of streamed_dot() needs for its partial sums and their
// announcement.
constexpr int64_t kPartialBytes = 16 * 128 * sizeof(float) + sizeof(uint32_t);

// Computes a product in tiles of 16 rows, for few rows a group. Reads matrices as fast as memory
// delivers them. Takes any k and n.
cudaError_t streamed_dot(Arguments const& arguments, cudaStream_t stream);

// Computes a product for more rows a group (quantized/plan.py). k has to be a multiple of 8.
cudaError_t decoded_dot(Arguments const& arguments, cudaStream_t stream);

// Unpacks matrices to out [matrices, k, n] of bfloat16.
struct UnpackArguments {
  Format format;
  int group_size;
  Matrices packed;
  void* out;
  int matrices;
  int k;
  int n;
};

cudaError_t unpack(UnpackArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::packed
