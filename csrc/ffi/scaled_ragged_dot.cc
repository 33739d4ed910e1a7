// Bindings of the FP8 ragged products: check the buffers, name the sizes and strides, launch.
#include "scaled/scaled_ragged_dot.h"

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffer_view.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/partial_sums.h"
#include "ffi/row_blocks.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using Scales = ffi::Buffer<ffi::F32>;

int blocks(int size) { return (size + kScaleBlock - 1) / kScaleBlock; }

// How lhs is scaled: the attribute `lhs_scaling`.
enum class RowScaling {
  kBlocks = 0,             // [m, ceil(k / 128)]
  kRows = 1,               // [m, 1]
  kTensor = 2,             // [1, 1]
  kBlocksColumnMajor = 3,  // [ceil(k / 128), m or more]
};

// How rhs is scaled: the attribute `rhs_scaling`.
enum class GroupScaling {
  kBlocks = 0,    // [g, ceil(n / 128), ceil(k / 128)]
  kChannels = 1,  // [g, n]
  kGroups = 2,    // [g, 1]
};

ffi::Error element_types(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer out,
                         ScaledArguments& arguments) {
  if (!element_type(lhs.element_type(), kFloat8s, arguments.type) ||
      !element_type(rhs.element_type(), kFloat8s, arguments.rhs_type) ||
      !element_type(out.element_type(), kFloats, arguments.out_type)) {
    return invalid("the kernels multiply float8_e4m3fn or float8_e5m2 into bf16, f16 or f32");
  }
  for (auto error :
       {whole_vectors("lhs", lhs), whole_vectors("rhs", rhs), whole_vectors("the result", out)}) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error row_scales(RowScaling scaling, Scales buffer, int batches, int m, int k,
                      RowScales& scales) {
  auto const shape = Shape<2>::of("lhs_scale", buffer);
  if (!shape) return shape.error();
  std::array<int, 2> expected;
  switch (scaling) {
    case RowScaling::kBlocks:
      expected = {m, blocks(k)};
      scales = {buffer.typed_data(), 0, blocks(k), 1};
      break;
    case RowScaling::kRows:
      expected = {m, 1};
      scales = {buffer.typed_data(), 0, 1, 0};
      break;
    case RowScaling::kTensor:
      expected = {1, 1};
      scales = {buffer.typed_data(), 0, 0, 0};
      break;
    case RowScaling::kBlocksColumnMajor:
      expected = {blocks(k), shape->size[1]};
      scales = {buffer.typed_data(), 0, 1, shape->size[1]};
      if (shape->size[1] < m) return invalid("lhs_scale has fewer columns than lhs has rows");
      break;
    default:
      return invalid("lhs_scaling is none of 0 to 3");
  }
  if (shape->batched) scales.batch_stride = int64_t(expected[0]) * expected[1];
  return shape->expect(expected, batches);
}

ffi::Error block_scales(Scales buffer, int batches, int groups, int n, int k, BlockScales& scales) {
  auto const shape = Shape<3>::of("rhs_scale", buffer);
  if (!shape) return shape.error();
  int64_t const group = int64_t(blocks(n)) * blocks(k);
  scales = {buffer.typed_data(), shape->batched ? groups * group : 0, group, blocks(k), 1};
  return shape->expect({groups, blocks(n), blocks(k)}, batches);
}

ffi::Error group_scales(GroupScaling scaling, Scales buffer, int batches, int groups, int n, int k,
                        ScaledArguments& arguments) {
  if (scaling == GroupScaling::kBlocks) {
    return block_scales(buffer, batches, groups, n, k, arguments.rhs_scales);
  }
  auto const shape = Shape<2>::of("rhs_scale", buffer);
  if (!shape) return shape.error();
  if (scaling == GroupScaling::kChannels) {
    arguments.channel_scales = buffer.typed_data();
    arguments.channel_batch_stride = shape->batched ? int64_t(groups) * n : 0;
    return shape->expect({groups, n}, batches);
  }
  if (scaling == GroupScaling::kGroups) {
    arguments.rhs_scales = {buffer.typed_data(), shape->batched ? groups : 0, 1, 0, 0};
    return shape->expect({groups, 1}, batches);
  }
  return invalid("rhs_scaling is none of 0 to 2");
}

// lhs may be a view of an array: the attribute `slice`.
ffi::Error scaled_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, Scales lhs_scale,
                                 ffi::AnyBuffer rhs, Scales rhs_scale, Sizes group_sizes,
                                 Sizes group_offset, ffi::Result<ffi::AnyBuffer> out,
                                 ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                                 ffi::Dictionary attributes) {
  Attributes given(attributes);
  std::optional<BufferView> view;
  if (auto error = use_view(given, lhs, view); error.failure()) return error;
  auto const lhs_scaling = static_cast<RowScaling>(given.get<int32_t>("lhs_scaling"));
  auto const rhs_scaling = static_cast<GroupScaling>(given.get<int32_t>("rhs_scaling"));
  TileConfig const tile = given.tile();
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<2>::of("out", *out);
  if (!out_shape) return out_shape.error();

  ScaledArguments arguments{};
  arguments.fast_accumulation = given.get<bool>("fast_accumulation");
  arguments.max_sms = given.max_sms();
  if (given.error().failure()) return given.error();
  auto const [m, n] = out_shape->size;
  int const k = lhs_shape->size[1], local_groups = rhs_shape->size[0], batches = out_shape->batches;
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  if (!groups) return groups.error();
  arguments.groups = *groups;
  for (auto error :
       {element_types(lhs, rhs, *out, arguments), lhs_shape->expect({m, k}, batches),
        rhs_shape->expect({local_groups, n, k}, batches),
        row_scales(lhs_scaling, lhs_scale, batches, m, k, arguments.lhs_scales),
        group_scales(rhs_scaling, rhs_scale, batches, local_groups, n, k, arguments)}) {
    if (error.failure()) return error;
  }
  arguments.lhs = lhs.untyped_data();
  arguments.rhs = rhs.untyped_data();
  arguments.out = out->untyped_data();
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.m = m;
  arguments.n = n;
  arguments.k = k;
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  if (tile.kind == KernelKind::kStreamK) {
    if (auto error = sums_fit(arguments.workspace_bytes, tile); error.failure()) return error;
  }
  bool const changes_along_k =
      arguments.lhs_scales.block_stride != 0 || arguments.rhs_scales.block_stride != 0;
  bool const by_channels = tile.kind != KernelKind::kSwapped && !changes_along_k;
  return launched(by_channels ? channel_scaled_noncontracting(tile, arguments, stream)
                              : scaled_ragged_noncontracting(tile, arguments, stream),
                  "scaled_ragged_noncontracting");
}

ffi::Error gathered_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, Scales lhs_scale,
                                   ffi::AnyBuffer rhs, Scales rhs_scale, Sizes group_sizes,
                                   Sizes group_offset, Sizes rows, ffi::Result<ffi::AnyBuffer> out,
                                   ffi::Result<ffi::Buffer<ffi::U8>>, ffi::Dictionary attributes) {
  Attributes given(attributes);
  TileConfig const tile = given.tile();
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<2>::of("out", *out);
  if (!out_shape) return out_shape.error();

  ScaledArguments arguments{};
  arguments.max_sms = given.max_sms();
  if (given.error().failure()) return given.error();
  auto const [m, n] = out_shape->size;
  auto const [tokens, k] = lhs_shape->size;
  int const local_groups = rhs_shape->size[0];
  auto const groups = groups_of(group_sizes, group_offset, 1, local_groups, m);
  if (!groups) return groups.error();
  for (auto error :
       {element_types(lhs, rhs, *out, arguments), has_shape<2>("lhs", lhs, {tokens, k}),
        has_shape<3>("rhs", rhs, {local_groups, n, k}), has_shape<2>("out", *out, {m, n}),
        has_shape<1>("rows", rows, {m}),
        row_scales(RowScaling::kBlocks, lhs_scale, 1, tokens, k, arguments.lhs_scales),
        block_scales(rhs_scale, 1, local_groups, n, k, arguments.rhs_scales)}) {
    if (error.failure()) return error;
  }
  arguments.groups = *groups;
  arguments.rows = {rows.typed_data(), 1, tokens};
  arguments.lhs = lhs.untyped_data();
  arguments.rhs = rhs.untyped_data();
  arguments.out = out->untyped_data();
  arguments.m = m;
  arguments.n = n;
  arguments.k = k;
  return launched(gathered_scaled_noncontracting(tile, arguments, stream),
                  "gathered_scaled_noncontracting");
}

// rhs may be a view of an array: the attribute `slice`.
ffi::Error scaled_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, Scales lhs_scale,
                              ffi::AnyBuffer rhs, Scales rhs_scale, Sizes group_sizes,
                              Sizes group_offset, ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::Buffer<ffi::U8>> /*workspace*/,
                              ffi::Dictionary attributes) {
  Attributes given(attributes);
  std::optional<BufferView> view;
  if (auto error = use_view(given, rhs, view); error.failure()) return error;
  int const m = given.get<int32_t>("m");
  TileConfig const tile = given.tile();
  auto const lhs_shape = Shape<3>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<3>::of("out", *out);
  if (!out_shape) return out_shape.error();
  auto const lhs_scale_shape = Shape<2>::of("lhs_scale", lhs_scale);
  if (!lhs_scale_shape) return lhs_scale_shape.error();
  auto const rhs_scale_shape = Shape<2>::of("rhs_scale", rhs_scale);
  if (!rhs_scale_shape) return rhs_scale_shape.error();

  ScaledArguments arguments{};
  arguments.max_sms = given.max_sms();
  if (given.error().failure()) return given.error();
  auto const [local_groups, k, n] = out_shape->size;
  int const row_blocks = lhs_shape->size[0], batches = out_shape->batches;
  if (m < 1 || row_blocks < blocks(m)) {
    return invalid("m is " + std::to_string(m) + ", but there are " + std::to_string(row_blocks) +
                   " blocks of 128 rows");
  }
  if (auto error = countable_blocks(row_blocks); error.failure()) return error;
  if (lhs_scale_shape->batched != lhs_shape->batched ||
      rhs_scale_shape->batched != rhs_shape->batched) {
    return invalid("an operand and its scales are both batched, or neither is");
  }
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  if (!groups) return groups.error();
  arguments.groups = *groups;
  // A single row of scales applies to all blocks.
  bool const lhs_is_even = lhs_scale_shape->size[0] == 1;
  bool const rhs_is_even = rhs_scale_shape->size[0] == 1;
  for (auto error : {element_types(lhs, rhs, *out, arguments),
                     lhs_shape->expect({row_blocks, k, kScaleBlock}, batches),
                     rhs_shape->expect({row_blocks, n, kScaleBlock}, batches),
                     lhs_scale_shape->expect({lhs_is_even ? 1 : row_blocks, k}, batches),
                     rhs_scale_shape->expect({rhs_is_even ? 1 : row_blocks, n}, batches)}) {
    if (error.failure()) return error;
  }
  arguments.lhs = lhs.untyped_data();
  arguments.rhs = rhs.untyped_data();
  arguments.out = out->untyped_data();
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.m = k;
  arguments.n = n;
  arguments.k = row_blocks * kScaleBlock;
  if (arguments.transposes_out = lhs_is_even && !rhs_is_even; arguments.transposes_out) {
    std::swap(arguments.lhs, arguments.rhs);
    std::swap(arguments.type, arguments.rhs_type);
    std::swap(arguments.lhs_batched, arguments.rhs_batched);
    std::swap(arguments.m, arguments.n);
    std::swap(lhs_scale, rhs_scale);
  }
  int const steps = lhs_is_even && rhs_is_even ? 1 : row_blocks;
  arguments.lhs_scales = {lhs_scale.typed_data(),
                          arguments.lhs_batched ? int64_t(steps) * arguments.m : 0, 1,
                          steps == 1 ? 0 : arguments.m};
  if (lhs_is_even || rhs_is_even) {
    arguments.channel_scales = rhs_scale.typed_data();
    arguments.channel_batch_stride = arguments.rhs_batched ? arguments.n : 0;
    return launched(channel_scaled_contracting(tile, arguments, stream),
                    "scaled_ragged_contracting");
  }
  arguments.column_scales = rhs_scale.typed_data();
  return launched(scaled_ragged_contracting(tile, arguments, stream), "scaled_ragged_contracting");
}

// The gradients of two matrices that rows of lhs were multiplied by. Scales of lhs are of columns,
// those of both rhs of blocks.
ffi::Error paired_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, Scales lhs_scale,
                              ffi::AnyBuffer first, Scales first_scale, ffi::AnyBuffer second,
                              Scales second_scale, Sizes group_sizes, Sizes group_offset,
                              ffi::Result<ffi::AnyBuffer> first_out,
                              ffi::Result<ffi::AnyBuffer> second_out, ffi::Dictionary attributes) {
  Attributes given(attributes);
  int const m = given.get<int32_t>("m"), max_sms = given.max_sms();
  TileConfig const tile = given.tile();
  if (given.error().failure()) return given.error();
  auto const shape = Shape<3>::of("the first result", *first_out);
  if (!shape) return shape.error();
  auto const lhs_shape = Shape<3>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const [local_groups, k, n] = shape->size;
  int const row_blocks = lhs_shape->size[0];
  if (m < 1 || row_blocks < blocks(m)) {
    return invalid("m is " + std::to_string(m) + ", but there are " + std::to_string(row_blocks) +
                   " blocks of 128 rows");
  }
  if (auto error = countable_blocks(row_blocks); error.failure()) return error;
  auto const groups = groups_of(group_sizes, group_offset, 1, local_groups, m);
  if (!groups) return groups.error();

  ScaledArguments arguments{};
  ScaledArguments other{};
  // The kernel has what differs as its rows, and stores results transposed.
  for (auto error : {element_types(first, lhs, *first_out, arguments),
                     element_types(second, lhs, *second_out, other),
                     has_shape<3>("lhs", lhs, {row_blocks, k, kScaleBlock}),
                     has_shape<2>("lhs_scale", lhs_scale, {1, k}),
                     has_shape<3>("the first rhs", first, {row_blocks, n, kScaleBlock}),
                     has_shape<2>("the scales of the first rhs", first_scale, {row_blocks, n}),
                     has_shape<3>("the second rhs", second, {row_blocks, n, kScaleBlock}),
                     has_shape<2>("the scales of the second rhs", second_scale, {row_blocks, n}),
                     has_shape<3>("the first result", *first_out, {local_groups, k, n}),
                     has_shape<3>("the second result", *second_out, {local_groups, k, n})}) {
    if (error.failure()) return error;
  }
  if (other.type != arguments.type || other.out_type != arguments.out_type) {
    return invalid("operands or results differ in type");
  }
  arguments.groups = *groups;
  arguments.max_sms = max_sms;
  arguments.lhs = first.untyped_data();
  arguments.second_lhs = second.untyped_data();
  arguments.rhs = lhs.untyped_data();
  arguments.out = first_out->untyped_data();
  arguments.second_out = second_out->untyped_data();
  arguments.m = n;
  arguments.n = k;
  arguments.k = row_blocks * kScaleBlock;
  arguments.lhs_scales = {first_scale.typed_data(), 0, 1, n};
  arguments.second_lhs_scales = {second_scale.typed_data(), 0, 1, n};
  arguments.channel_scales = lhs_scale.typed_data();
  arguments.transposes_out = true;
  return launched(paired_scaled_contracting(tile, arguments, stream), "paired_scaled_contracting");
}

Handler<scaled_noncontracting> const noncontracting_handler{"scaled_ragged_noncontracting.v5"};
Handler<gathered_noncontracting> const gathered_handler{"gathered_scaled_noncontracting.v1"};
Handler<scaled_contracting> const contracting_handler{"scaled_ragged_contracting.v3"};
Handler<paired_contracting> const paired_handler{"paired_scaled_contracting.v1"};

}  // namespace
}  // namespace jgg
