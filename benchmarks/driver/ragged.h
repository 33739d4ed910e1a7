// Problems that are bfloat16 ragged products.
#pragma once

#include "problem.h"
#include "ragged/ragged_dot.h"
#include "ragged/tiles.h"

namespace driver {

// Adds `values` to `to`, in vectors of four floats.
static __global__ void add_to(float4* to, float4 const* values, int64_t vectors) {
  int64_t const i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  float4 sum = to[i];
  float4 const value = values[i];
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
  to[i] = sum;
}

// The kinds of problems:
//   nn               rhs [groups, k, n]
//   nt               rhs [groups, n, k]
//   tn               rows are contracted, and the result is [groups, k, n]
//   tn_f32           as tn, with a float32 result
//   tn_f32_add       the kernel adds the float32 product to sums
//   tn_f32_then_add  one kernel computes the float32 product, and another adds it to sums
inline Prepared prepare_ragged(Problem const& problem, Choice const& choice) {
  bool const contracting = problem.kind[0] == 't', to_f32 = problem.kind != "tn" && contracting;
  bool const adds = problem.kind == "tn_f32_add", then_adds = problem.kind == "tn_f32_then_add";
  bool const transposed = problem.kind == "nt";
  int64_t const m = problem.rows, k = problem.k, n = problem.n, groups = problem.groups;
  Prepared prepared{};
  int64_t const rhs_size = contracting ? m * n : groups * k * n;
  int64_t const out_size = contracting ? groups * k * n : m * n;
  auto* lhs = prepared.keep<__nv_bfloat16>(random_data<__nv_bfloat16>(m * k, kLhs));
  auto* rhs = prepared.keep<__nv_bfloat16>(random_data<__nv_bfloat16>(rhs_size, kRhs));
  prepared.out_bytes = out_size * (to_f32 ? sizeof(float) : sizeof(__nv_bfloat16));

  jgg::RaggedDotArguments arguments{};
  arguments.lhs = lhs;
  arguments.rhs = rhs;
  arguments.groups.sizes = prepared.keep<int>(to_device(problem.sizes));
  arguments.groups.offset = prepared.keep<int>(to_device(std::vector<int>{0}));
  arguments.out = prepared.keep<void>(allocate(prepared.out_bytes));
  set_workspace(arguments, keep_workspace(prepared), 0);
  arguments.type = jgg::ElementType::kBf16;
  arguments.out_type = to_f32 ? jgg::ElementType::kF32 : jgg::ElementType::kBf16;
  arguments.contracting = contracting;
  arguments.transpose_rhs = transposed;
  arguments.groups.batches = 1;
  arguments.groups.groups = arguments.groups.local_groups = problem.groups;
  arguments.groups.rows = problem.rows;
  arguments.k = problem.k;
  arguments.n = problem.n;
  void* const sums = arguments.out;
  if (then_adds) arguments.out = prepared.keep<void>(allocate(prepared.out_bytes));
  if (adds) set_accumulate(arguments, true, 0);
  if (adds || then_adds) {
    prepared.initial = prepared.keep<void>(random_data<Sum>(out_size, kOut));
  }
  auto const tiles =
      contracting ? list(jgg::sm90::ContractingTiles{}) : list(jgg::sm90::NoncontractingTiles{});
  jgg::TileConfig tile = tiles.at(choice.config);
  if (choice.stream_k) tile.kind = jgg::KernelKind::kStreamK;
  prepared.launch = [=](cudaStream_t stream) {
    cudaError_t const status = contracting ? jgg::ragged_contracting(tile, arguments, stream)
                                           : jgg::ragged_noncontracting(tile, arguments, stream);
    if (!then_adds || status != cudaSuccess) return status;
    add_to<<<(out_size / 4 + 255) / 256, 256, 0, stream>>>(
        static_cast<float4*>(sums), static_cast<float4 const*>(arguments.out), out_size / 4);
    return cudaGetLastError();
  };
  prepared.flops = 2.0 * problem.used_rows() * k * n;

  Reference& reference = prepared.reference;
  reference.out = sums;
  reference.out_type = to_f32 ? Element::kF32 : Element::kBf16;
  reference.groups = problem.groups;
  reference.accumulation_error = 1e-5f;
  reference.added_to = static_cast<float const*>(prepared.initial);
  set_groups(prepared, problem.sizes, 1);
  reference.stacked = contracting;
  reference.rows = contracting ? problem.k : problem.rows;
  reference.columns = problem.n;
  reference.terms = problem.k;
  if (contracting) {
    reference.lhs = {lhs, Element::kBf16, 0, 1, k};
    reference.rhs = {rhs, Element::kBf16, 0, 1, n};
  } else {
    reference.lhs = {lhs, Element::kBf16, 0, k, 1};
    reference.rhs = transposed ? Factor{rhs, Element::kBf16, k * n, k, 1}
                               : Factor{rhs, Element::kBf16, k * n, 1, n};
  }
  return prepared;
}

}  // namespace driver
