// Bindings of the FP8 ragged products: check the buffers, read the sizes and strides, launch.
#include "scaled/scaled_ragged_dot.h"

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "ffi/bindings.h"
#include "ffi/buffer_view.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/row_blocks.h"
#include "ffi/workspace.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

int blocks(int size) { return ceil_div(size, kScaleBlock); }

// The values of the attribute `lhs_scaling`, and the shapes of scales that they stand for.
enum class RowScaling {
  kBlocks = 0,             // [m, ceil(k / 128)]
  kRows = 1,               // [m, 1]
  kTensor = 2,             // [1, 1]
  kBlocksColumnMajor = 3,  // [ceil(k / 128), m or more]
};

// The values of the attribute `rhs_scaling`, and the shapes of scales that they stand for.
enum class GroupScaling {
  kBlocks = 0,    // [g, ceil(n / 128), ceil(k / 128)]
  kChannels = 1,  // [g, n]
  kGroups = 2,    // [g, 1]
};

void check_types(Call& call, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer out,
                 ScaledArguments& a) {
  constexpr char kTypes[] =
      "the kernels multiply float8_e4m3fn or float8_e5m2 into bf16, f16 or f32";
  a.type = call.type(lhs, kFloat8s, kTypes);
  a.rhs_type = call.type(rhs, kFloat8s, kTypes);
  a.out_type = call.type(out, kFloats, kTypes);
  call.expect_vectors("lhs", lhs);
  call.expect_vectors("rhs", rhs);
  call.expect_vectors("the result", out);
  a.lhs = lhs.untyped_data();
  a.rhs = rhs.untyped_data();
  a.out = out.untyped_data();
}

RowScales row_scales(Call& call, RowScaling scaling, Floats buffer, int batches, int m, int k) {
  auto const shape = call.shape<2>("lhs_scale", buffer);
  RowScales scales{buffer.typed_data(), 0, 0, 0};
  std::array<int, 2> expected{};
  switch (scaling) {
    case RowScaling::kBlocks:
      expected = {m, blocks(k)};
      scales.row_stride = blocks(k);
      scales.block_stride = 1;
      break;
    case RowScaling::kRows:
      expected = {m, 1};
      scales.row_stride = 1;
      break;
    case RowScaling::kTensor:
      expected = {1, 1};
      break;
    case RowScaling::kBlocksColumnMajor:
      expected = {blocks(k), shape.size[1]};
      scales.row_stride = 1;
      scales.block_stride = shape.size[1];
      if (shape.size[1] < m) call.fail("lhs_scale has fewer columns than lhs has rows");
      break;
    default:
      call.fail("lhs_scaling has to be from 0 to 3");
  }
  if (shape.batched) scales.batch_stride = int64_t(expected[0]) * expected[1];
  call.expect(shape, expected, batches);
  return scales;
}

BlockScales block_scales(Call& call, Floats buffer, int batches, int groups, int n, int k) {
  auto const shape = call.shape<3>("rhs_scale", buffer);
  int64_t const group = int64_t(blocks(n)) * blocks(k);
  call.expect(shape, {groups, blocks(n), blocks(k)}, batches);
  return {buffer.typed_data(), shape.batched ? groups * group : 0, group, blocks(k), 1};
}

void take_group_scales(Call& call, GroupScaling scaling, Floats buffer, int batches, int groups,
                       int n, int k, ScaledArguments& a) {
  if (scaling == GroupScaling::kBlocks) {
    a.rhs_scales = block_scales(call, buffer, batches, groups, n, k);
    return;
  }
  auto const shape = call.shape<2>("rhs_scale", buffer);
  if (scaling == GroupScaling::kChannels) {
    a.channel_scales = buffer.typed_data();
    a.channel_batch_stride = shape.batched ? int64_t(groups) * n : 0;
    call.expect(shape, {groups, n}, batches);
  } else if (scaling == GroupScaling::kGroups) {
    a.rhs_scales = {buffer.typed_data(), shape.batched ? groups : 0, 1, 0, 0};
    call.expect(shape, {groups, 1}, batches);
  } else {
    call.fail("rhs_scaling has to be from 0 to 2");
  }
}

// lhs may be a view of an array (`use_view`). The workspace is for partial sums.
ffi::Error scaled_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, Floats lhs_scale,
                                 ffi::AnyBuffer rhs, Floats rhs_scale, Sizes group_sizes,
                                 Sizes group_offset, Result out, WorkspaceResult workspace,
                                 ffi::Dictionary attributes) {
  Call call(attributes);
  std::optional<BufferView> view;
  use_view(call, lhs, view);
  auto const lhs_scaling = static_cast<RowScaling>(call.get<int32_t>("lhs_scaling"));
  auto const rhs_scaling = static_cast<GroupScaling>(call.get<int32_t>("rhs_scaling"));
  TileConfig const tile = call.tile();
  ScaledArguments a{};
  a.fast_accumulation = call.get<bool>("fast_accumulation");
  a.max_sms = call.max_sms();
  auto const lhs_shape = call.shape<2>("lhs", lhs);
  auto const rhs_shape = call.shape<3>("rhs", rhs);
  auto const out_shape = call.shape<2>("out", *out);
  auto const [m, n] = out_shape.size;
  int const k = lhs_shape.size[1], local_groups = rhs_shape.size[0], batches = out_shape.batches;
  a.groups = groups_of(call, group_sizes, group_offset, batches, local_groups, m);
  check_types(call, lhs, rhs, *out, a);
  call.expect(lhs_shape, {m, k}, batches);
  call.expect(rhs_shape, {local_groups, n, k}, batches);
  a.lhs_scales = row_scales(call, lhs_scaling, lhs_scale, batches, m, k);
  take_group_scales(call, rhs_scaling, rhs_scale, batches, local_groups, n, k, a);
  a.lhs_batched = lhs_shape.batched;
  a.rhs_batched = rhs_shape.batched;
  a.m = m;
  a.n = n;
  a.k = k;
  set_workspace(workspace, a);
  if (tile.kind == KernelKind::kStreamK) expect_room_for_sums(call, a.workspace_bytes, tile);
  if (call.failed()) return call.error();
  bool const changes_along_k = a.lhs_scales.block_stride != 0 || a.rhs_scales.block_stride != 0;
  bool const by_channels = tile.kind != KernelKind::kSwapped && !changes_along_k;
  return launched(by_channels ? channel_scaled_noncontracting(tile, a, stream)
                              : scaled_ragged_noncontracting(tile, a, stream),
                  "scaled_ragged_noncontracting");
}

// The workspace is unused.
ffi::Error gathered_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, Floats lhs_scale,
                                   ffi::AnyBuffer rhs, Floats rhs_scale, Sizes group_sizes,
                                   Sizes group_offset, Sizes rows, Result out, WorkspaceResult,
                                   ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  ScaledArguments a{};
  a.max_sms = call.max_sms();
  auto const [m, n] = call.size<2>("out", *out);
  auto const [tokens, k] = call.size<2>("lhs", lhs);
  int const local_groups = call.size<3>("rhs", rhs)[0];
  a.groups = groups_of(call, group_sizes, group_offset, 1, local_groups, m);
  check_types(call, lhs, rhs, *out, a);
  call.expect<3>("rhs", rhs, {local_groups, n, k});
  call.expect<1>("rows", rows, {m});
  a.lhs_scales = row_scales(call, RowScaling::kBlocks, lhs_scale, 1, tokens, k);
  a.rhs_scales = block_scales(call, rhs_scale, 1, local_groups, n, k);
  a.rows = {rows.typed_data(), 1, tokens};
  a.m = m;
  a.n = n;
  a.k = k;
  if (call.failed()) return call.error();
  return launched(gathered_scaled_noncontracting(tile, a, stream),
                  "gathered_scaled_noncontracting");
}

// Fails unless `row_blocks` blocks of 128 rows are enough for the `m` rows of the call.
void check_blocks(Call& call, int m, int row_blocks) {
  if (m < 1 || row_blocks < blocks(m)) {
    call.fail("m is " + std::to_string(m) + ", but there are " + std::to_string(row_blocks) +
              " blocks of 128 rows");
  }
  call.expect_size("the number of rows of all blocks of 128", int64_t(row_blocks) * kScaleBlock);
}

// rhs may be a view of an array (`use_view`). The workspace is unused.
ffi::Error scaled_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, Floats lhs_scale,
                              ffi::AnyBuffer rhs, Floats rhs_scale, Sizes group_sizes,
                              Sizes group_offset, Result out, WorkspaceResult,
                              ffi::Dictionary attributes) {
  Call call(attributes);
  std::optional<BufferView> view;
  use_view(call, rhs, view);
  int const m = call.get<int32_t>("m");
  TileConfig const tile = call.tile();
  ScaledArguments a{};
  a.max_sms = call.max_sms();
  auto const lhs_shape = call.shape<3>("lhs", lhs);
  auto const rhs_shape = call.shape<3>("rhs", rhs);
  auto const out_shape = call.shape<3>("out", *out);
  auto const lhs_scale_shape = call.shape<2>("lhs_scale", lhs_scale);
  auto const rhs_scale_shape = call.shape<2>("rhs_scale", rhs_scale);
  auto const [local_groups, k, n] = out_shape.size;
  int const row_blocks = lhs_shape.size[0], batches = out_shape.batches;
  check_blocks(call, m, row_blocks);
  if (lhs_scale_shape.batched != lhs_shape.batched ||
      rhs_scale_shape.batched != rhs_shape.batched) {
    call.fail("an operand and its scales are both batched, or neither is");
  }
  a.groups = groups_of(call, group_sizes, group_offset, batches, local_groups, m);
  // A single row of scales applies to all blocks.
  bool const lhs_is_even = lhs_scale_shape.size[0] == 1;
  bool const rhs_is_even = rhs_scale_shape.size[0] == 1;
  check_types(call, lhs, rhs, *out, a);
  call.expect(lhs_shape, {row_blocks, k, kScaleBlock}, batches);
  call.expect(rhs_shape, {row_blocks, n, kScaleBlock}, batches);
  call.expect(lhs_scale_shape, {lhs_is_even ? 1 : row_blocks, k}, batches);
  call.expect(rhs_scale_shape, {rhs_is_even ? 1 : row_blocks, n}, batches);
  if (call.failed()) return call.error();
  a.lhs_batched = lhs_shape.batched;
  a.rhs_batched = rhs_shape.batched;
  a.m = k;
  a.n = n;
  a.k = row_blocks * kScaleBlock;
  if (a.transposes_out = lhs_is_even && !rhs_is_even; a.transposes_out) {
    std::swap(a.lhs, a.rhs);
    std::swap(a.type, a.rhs_type);
    std::swap(a.lhs_batched, a.rhs_batched);
    std::swap(a.m, a.n);
    std::swap(lhs_scale, rhs_scale);
  }
  int const steps = lhs_is_even && rhs_is_even ? 1 : row_blocks;
  a.lhs_scales = {lhs_scale.typed_data(), a.lhs_batched ? int64_t(steps) * a.m : 0, 1,
                  steps == 1 ? 0 : a.m};
  bool const by_channels = lhs_is_even || rhs_is_even;
  (by_channels ? a.channel_scales : a.column_scales) = rhs_scale.typed_data();
  if (by_channels) a.channel_batch_stride = a.rhs_batched ? a.n : 0;
  return launched(by_channels ? channel_scaled_contracting(tile, a, stream)
                              : scaled_ragged_contracting(tile, a, stream),
                  "scaled_ragged_contracting");
}

// Computes the gradients of two matrices that lhs was multiplied by. lhs has a scale for each
// column. Each rhs has a scale for each column of each block.
ffi::Error paired_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, Floats lhs_scale,
                              ffi::AnyBuffer first, Floats first_scale, ffi::AnyBuffer second,
                              Floats second_scale, Sizes group_sizes, Sizes group_offset,
                              Result first_out, Result second_out, ffi::Dictionary attributes) {
  Call call(attributes);
  int const m = call.get<int32_t>("m");
  TileConfig const tile = call.tile();
  ScaledArguments a{}, other{};
  a.max_sms = call.max_sms();
  auto const [local_groups, k, n] = call.size<3>("the first result", *first_out);
  int const row_blocks = call.size<3>("lhs", lhs)[0];
  check_blocks(call, m, row_blocks);
  a.groups = groups_of(call, group_sizes, group_offset, 1, local_groups, m);
  // In the kernel the operands change sides: `first` and `second` are its lhs, and it stores
  // results transposed.
  check_types(call, first, lhs, *first_out, a);
  check_types(call, second, lhs, *second_out, other);
  call.expect<3>("lhs", lhs, {row_blocks, k, kScaleBlock});
  call.expect<2>("lhs_scale", lhs_scale, {1, k});
  call.expect<3>("the first rhs", first, {row_blocks, n, kScaleBlock});
  call.expect<2>("the scales of the first rhs", first_scale, {row_blocks, n});
  call.expect<3>("the second rhs", second, {row_blocks, n, kScaleBlock});
  call.expect<2>("the scales of the second rhs", second_scale, {row_blocks, n});
  call.expect<3>("the second result", *second_out, {local_groups, k, n});
  if (other.type != a.type || other.out_type != a.out_type) {
    call.fail("operands or results differ in type");
  }
  if (call.failed()) return call.error();
  a.second_lhs = other.lhs;
  a.second_out = other.out;
  a.m = n;
  a.n = k;
  a.k = row_blocks * kScaleBlock;
  a.lhs_scales = {first_scale.typed_data(), 0, 1, n};
  a.second_lhs_scales = {second_scale.typed_data(), 0, 1, n};
  a.channel_scales = lhs_scale.typed_data();
  a.transposes_out = true;
  return launched(paired_scaled_contracting(tile, a, stream), "paired_scaled_contracting");
}

Handler<scaled_noncontracting> const noncontracting_handler{"scaled_ragged_noncontracting.v5"};
Handler<gathered_noncontracting> const gathered_handler{"gathered_scaled_noncontracting.v1"};
Handler<scaled_contracting> const contracting_handler{"scaled_ragged_contracting.v3"};
Handler<paired_contracting> const paired_handler{"paired_scaled_contracting.v1"};

}  // namespace
}  // namespace jgg
