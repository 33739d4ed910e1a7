// Problems that are FP8 ragged products.
#pragma once

#include "problem.h"
#include "scaled/scaled_ragged_dot.h"

namespace driver {

constexpr int64_t kBlock = 128;

inline int64_t blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// Sets rows that no group owns to zero, in transposed blocks [columns, 128] of 128 rows.
static __global__ void clear_gaps(__nv_fp8_e4m3* data, int64_t columns, int rows,
                                  uint8_t const* owned) {
  int64_t const count = columns * rows, stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    if (!owned[i / kBlock / columns * kBlock + i % kBlock]) data[i] = __nv_fp8_e4m3(0.0f);
  }
}

// Returns transposed blocks of rows [padded / 128, columns, 128]. A block has rows of one group.
inline std::shared_ptr<void> transposed_rows(Problem const& problem, int64_t columns, int padded,
                                             Seed seed) {
  std::vector<uint8_t> owned(padded);
  auto at = owned.begin();
  for (int const size : problem.sizes) {
    std::fill_n(at, size, 1);
    at += blocks(size) * kBlock;
  }
  auto const mask = to_device(owned);
  auto const data = random_data<__nv_fp8_e4m3>(columns * padded, seed);
  clear_gaps<<<1024, 256>>>(static_cast<__nv_fp8_e4m3*>(data.get()), columns, padded,
                            static_cast<uint8_t const*>(mask.get()));
  require(cudaDeviceSynchronize(), "clear_gaps");
  return data;
}

// These tiles are those of Python's plan, jax_grouped_gemm/_src/fp8/scaled/plan.py.
constexpr jgg::TileConfig kScaledTile{128, 256, 2},
    kSwappedTile{32, 128, 1, jgg::KernelKind::kSwapped};

// Prepares what noncontracting and contracting products share.
inline Prepared prepare_common(Problem const& problem, jgg::ScaledArguments& arguments,
                               size_t out_bytes) {
  Prepared prepared{};
  prepared.out_bytes = out_bytes;
  prepared.flops = 2.0 * problem.used_rows() * problem.k * problem.n;
  arguments.out = prepared.keep<void>(allocate(out_bytes));
  arguments.groups = {};
  arguments.groups.sizes = prepared.keep<int>(to_device(problem.sizes));
  arguments.groups.offset = prepared.keep<int>(to_device(std::vector<int>{0}));
  arguments.groups.batches = 1;
  arguments.groups.groups = arguments.groups.local_groups = problem.groups;
  arguments.groups.rows = problem.rows;
  prepared.reference.out = arguments.out;
  prepared.reference.groups = problem.groups;
  prepared.reference.columns = problem.n;
  // The tensor cores keep about 14 bits of a sum.
  prepared.reference.accumulation_error = 1e-3f;
  return prepared;
}

// Products of lhs [rows, k] and rhs [groups, n, k] with a bfloat16 result, of these kinds:
//   fp8_nt                scales for blocks of 1 x 128 of lhs and of 128 x 128 of rhs
//   fp8_nt_padded         as fp8_nt, with rows of scales padded to multiples of 16 bytes
//   fp8_nt_rows           a scale for each row of lhs and of rhs
//   fp8_nt_rows_in_steps  as fp8_nt_rows, by the kernel whose scales may change along K
//   fp8_nt_rows_fast      as fp8_nt_rows, but only the tensor cores add
inline Prepared prepare_scaled_noncontracting(Problem const& problem, Choice const& choice) {
  int64_t const m = problem.rows, k = problem.k, n = problem.n, groups = problem.groups;
  jgg::ScaledArguments arguments{};
  Prepared prepared = prepare_common(problem, arguments, m * n * sizeof(__nv_bfloat16));
  auto* lhs = prepared.keep<void>(random_data<__nv_fp8_e4m3>(m * k, kLhs));
  auto* rhs = prepared.keep<void>(random_data<__nv_fp8_e4m3>(groups * n * k, kRhs));
  bool const by_rows = problem.kind.starts_with("fp8_nt_rows");
  bool const in_steps = problem.kind == "fp8_nt_rows_in_steps";
  arguments.fast_accumulation = problem.kind == "fp8_nt_rows_fast";
  if (arguments.fast_accumulation) prepared.reference.accumulation_error = 1e-2f;
  int64_t const along_k = problem.kind == "fp8_nt_padded" ? (blocks(k) + 3) / 4 * 4 : blocks(k);
  int64_t const lhs_pitch = by_rows ? 1 : along_k, rhs_pitch = by_rows ? 1 : along_k;
  int64_t const rhs_rows = by_rows ? n : blocks(n), step = by_rows ? 0 : 1;
  auto* lhs_scales = prepared.keep<float>(random_data<float>(m * lhs_pitch, kLhsScales));
  auto* rhs_scales =
      prepared.keep<float>(random_data<float>(groups * rhs_rows * rhs_pitch, kRhsScales));
  arguments.lhs = lhs;
  arguments.rhs = rhs;
  arguments.type = arguments.rhs_type = jgg::ElementType::kE4m3;
  arguments.out_type = jgg::ElementType::kBf16;
  arguments.lhs_scales = {lhs_scales, 0, int(lhs_pitch), int(step)};
  if (by_rows) {
    arguments.channel_scales = rhs_scales;
  } else {
    arguments.rhs_scales = {rhs_scales, 0, rhs_rows * rhs_pitch, int(rhs_pitch), 1};
  }
  arguments.m = problem.rows;
  arguments.n = problem.n;
  arguments.k = problem.k;
  set_workspace(arguments, keep_workspace(prepared), 0);
  bool const swapped = problem.rows <= int64_t(choice.few_rows) * problem.groups;
  auto tile = swapped ? kSwappedTile : kScaledTile;
  if (!swapped && choice.stream_k) tile.kind = jgg::KernelKind::kStreamK;
  bool const by_channels = by_rows && !in_steps && tile.kind == kScaledTile.kind;
  prepared.launch = [=](cudaStream_t stream) {
    return by_channels ? jgg::channel_scaled_noncontracting(tile, arguments, stream)
                       : jgg::scaled_ragged_noncontracting(tile, arguments, stream);
  };

  Reference& reference = prepared.reference;
  set_groups(prepared, problem.sizes, 1);
  reference.out_type = Element::kBf16;
  reference.rows = problem.rows;
  reference.terms = problem.k;
  reference.lhs = {lhs, Element::kFp8, 0, k, 1, lhs_scales, 0, lhs_pitch, step, 1};
  reference.rhs = {rhs,        Element::kFp8,        k * n,     k,    1,
                   rhs_scales, rhs_rows * rhs_pitch, rhs_pitch, step, by_rows ? 1 : int(kBlock)};
  return prepared;
}

// Products of lhs [p / 128, k, 128] and rhs [p / 128, n, 128], where p counts rows with padding. In
// each column, 128 rows of a group share a scale. The result of "fp8_tn" is bfloat16, and that of
// "fp8_tn_f32" is float32.
inline Prepared prepare_scaled_contracting(Problem const& problem) {
  int64_t const k = problem.k, n = problem.n, groups = problem.groups;
  int64_t const padded = kBlock * (blocks(problem.rows) + std::min(problem.groups, problem.rows));
  jgg::ScaledArguments arguments{};
  bool const to_f32 = problem.kind == "fp8_tn_f32";
  Prepared prepared =
      prepare_common(problem, arguments, groups * k * n * (to_f32 ? sizeof(float) : 2));
  auto* lhs = prepared.keep<void>(transposed_rows(problem, k, int(padded), kLhs));
  auto* rhs = prepared.keep<void>(transposed_rows(problem, n, int(padded), kRhs));
  auto* lhs_scales = prepared.keep<float>(random_data<float>(padded / kBlock * k, kLhsScales));
  auto* rhs_scales = prepared.keep<float>(random_data<float>(padded / kBlock * n, kRhsScales));
  arguments.lhs = lhs;
  arguments.rhs = rhs;
  arguments.type = arguments.rhs_type = jgg::ElementType::kE4m3;
  arguments.out_type = to_f32 ? jgg::ElementType::kF32 : jgg::ElementType::kBf16;
  arguments.lhs_scales = {lhs_scales, 0, 1, problem.k};
  arguments.column_scales = rhs_scales;
  arguments.m = problem.k;
  arguments.n = problem.n;
  arguments.k = int(padded);
  prepared.launch = [=](cudaStream_t stream) {
    return jgg::scaled_ragged_contracting(kScaledTile, arguments, stream);
  };

  Reference& reference = prepared.reference;
  set_groups(prepared, problem.sizes, int(kBlock));
  reference.out_type = to_f32 ? Element::kF32 : Element::kBf16;
  reference.stacked = true;
  reference.rows = problem.k;
  reference.lhs = {lhs, Element::kFp8, 0, kBlock, 1, lhs_scales, 0, 1, k, 1, kBlock * (k - 1)};
  reference.rhs = {rhs, Element::kFp8, 0, kBlock, 1, rhs_scales, 0, 1, n, 1, kBlock * (n - 1)};
  return prepared;
}

}  // namespace driver
