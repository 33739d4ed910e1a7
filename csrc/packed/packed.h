// The interface of the products of 16-bit rows and packed matrices of 4 or 8 bits. No CUTLASS here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mlp/gated_ragged_dot.h"

namespace jgg::packed {

// How matrices are quantised and packed: jax_grouped_gemm/_src/quantized/pack.py says which bit is
// where.
enum class Format : int { kMxFp4, kInt4, kInt8 };

// A record: 64 columns and 64 of K.
constexpr int kSide = 64;

constexpr int bits_of(Format format) { return format == Format::kInt8 ? 8 : 4; }
constexpr int record_bytes(Format format) { return kSide * kSide * bits_of(format) / 8; }

// A stack of matrices [matrices, k, n], in records [matrices, ceil(n / 64), ceil(k / 64)].
struct Matrices {
  // [..., 2048 or 4096]
  uint8_t const* values = nullptr;
  // MXFP4: exponents of groups of 32, [matrices, ceil(n / 64), ceil(k / 64), 128]. int4: bfloat16
  // [matrices, ceil(n / 64), groups, 64].
  uint8_t const* scales = nullptr;
  // int4, or null: [matrices, ceil(n / 64), groups, 64]
  uint8_t const* zero_points = nullptr;
  // [matrices, 64 ceil(n / 64)], null for int4
  float const* channel_scales = nullptr;
};

// Rows of a tile of the kernel for more rows.
constexpr int kFewRows = 32;
constexpr int kManyRows = 128;

// As of mlp::GatedArguments, whose matrices are not used: these are instead.
struct Arguments {
  mlp::GatedArguments product;
  Format format;
  int group_size;  // along K, of elements that share a scale; of int4 32, 64 or 128
  Matrices gate;
  Matrices up;  // without values if there are none
  int tile_m;   // of the kernel for more rows: kFewRows, not of int8, or kManyRows
  // Partial sums of the kernel for few rows.
  void* workspace;
  int64_t workspace_bytes;
};

// Partial sums of one thread block of the kernel for few rows.
constexpr int64_t kPartialBytes = 16 * 128 * sizeof(float) + sizeof(uint32_t);

// Reads matrices as fast as memory gives them: for groups of up to 16 rows. Any k, any n.
cudaError_t streamed_dot(Arguments const& arguments, cudaStream_t stream);

// For groups of more rows. k is a multiple of 8.
cudaError_t decoded_dot(Arguments const& arguments, cudaStream_t stream);

// matrices -> out [matrices, k, n] of bfloat16.
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
