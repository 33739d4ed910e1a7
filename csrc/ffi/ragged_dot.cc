// Bindings of the ragged products: check the buffers, name the sizes, launch.
#include "sm90/ragged_dot.h"

#include <array>
#include <string>
#include <string_view>

#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/handlers.h"
#include "ffi/partial_sums.h"
#include "sm90/f32/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using sm90::ElementType;
using sm90::RaggedDotArguments;
using sm90::TileConfig;

std::array<int, 2> matrix(int rows, int columns, bool transpose) {
  return transpose ? std::array<int, 2>{columns, rows} : std::array<int, 2>{rows, columns};
}

using Sizes = ffi::Buffer<ffi::S32>;
using WorkspaceResult = ffi::Result<ffi::Buffer<ffi::U8>>;

// The part that the products have in common: types, pointers and group sizes.
ffi::Error common_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, Sizes group_sizes,
                            Sizes group_offset, ffi::AnyBuffer out, int batches,
                            RaggedDotArguments& arguments) {
  ElementType rhs_type;
  if (!element_type(lhs.element_type(), arguments.type) ||
      !element_type(rhs.element_type(), rhs_type) ||
      !element_type(out.element_type(), arguments.out_type) || arguments.type != rhs_type ||
      (arguments.out_type != arguments.type && arguments.out_type != ElementType::kF32)) {
    return invalid("the kernels multiply bf16, f16 or f32 into the same type or f32");
  }
  auto const sizes = Shape<1>::of("group_sizes", group_sizes);
  if (!sizes) return sizes.error();
  auto const offset = Shape<1>::of("group_offset", group_offset);
  if (!offset) return offset.error();
  if (auto error = sizes->expect({sizes->size[0]}, batches); error.failure()) return error;
  if (auto error = offset->expect({1}, batches); error.failure()) return error;

  arguments.lhs = lhs.untyped_data();
  arguments.rhs = rhs.untyped_data();
  arguments.group_sizes = group_sizes.typed_data();
  arguments.group_offset = group_offset.typed_data();
  arguments.out = out.untyped_data();
  arguments.batches = batches;
  arguments.group_sizes_batched = sizes->batched;
  arguments.group_offset_batched = offset->batched;
  arguments.groups = sizes->size[0];
  return ffi::Error::Success();
}

// Takes over the workspace and the number of terms, once the sizes are known.
ffi::Error use_workspace(WorkspaceResult workspace, TileConfig tile, int terms,
                         RaggedDotArguments& arguments) {
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  arguments.terms = terms;
  if (tile.stream_k) {
    if (auto error = sums_fit(arguments.workspace_bytes, tile); error.failure()) return error;
  }
  if (arguments.type != ElementType::kF32) return ffi::Error::Success();
  if (terms != 1 && terms != 3) {
    return invalid("a product of f32 takes 1 or 3 terms, not " + std::to_string(terms));
  }
  if (is_transposed(tile)) return ffi::Error::Success();  // splits operands on their way
  int64_t const needed = sm90::f32::Workspace(arguments).bytes();
  if (arguments.workspace_bytes < needed) {
    return invalid("the workspace has " + std::to_string(arguments.workspace_bytes) +
                   " bytes, but the parts of the operands take " + std::to_string(needed));
  }
  return ffi::Error::Success();
}

ffi::Error ragged_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                 Sizes group_sizes, Sizes group_offset,
                                 ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                                 bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                                 int32_t tile_n, int32_t cluster, bool stream_k, int32_t terms) {
  TileConfig const config{tile_m, tile_n, cluster, stream_k};
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<2>::of("out", *out);
  if (!out_shape) return out_shape.error();

  RaggedDotArguments arguments{};
  if (auto error = common_arguments(lhs, rhs, group_sizes, group_offset, *out, out_shape->batches,
                                    arguments);
      error.failure()) {
    return error;
  }
  auto const [m, n] = out_shape->size;
  int const k = lhs_shape->size[transpose_lhs ? 0 : 1], groups = rhs_shape->size[0];
  if (auto error = lhs_shape->expect(matrix(m, k, transpose_lhs), arguments.batches);
      error.failure()) {
    return error;
  }
  if (auto error = rhs_shape->expect({groups, transpose_rhs ? n : k, transpose_rhs ? k : n},
                                     arguments.batches);
      error.failure()) {
    return error;
  }

  arguments.transpose_lhs = transpose_lhs;
  arguments.transpose_rhs = transpose_rhs;
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.local_groups = groups;
  arguments.m = m;
  arguments.k = k;
  arguments.n = n;
  arguments.contracting = false;
  if (auto error = use_workspace(workspace, config, terms, arguments); error.failure())
    return error;
  return launched(sm90::ragged_noncontracting(config, arguments, stream), "ragged_noncontracting");
}

// Shapes and sizes of a contracting product.
ffi::Error contracting_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, Sizes group_sizes,
                                 Sizes group_offset, ffi::AnyBuffer out, bool transpose_lhs,
                                 bool transpose_rhs, RaggedDotArguments& arguments) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<2>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<3>::of("out", out);
  if (!out_shape) return out_shape.error();

  if (auto error =
          common_arguments(lhs, rhs, group_sizes, group_offset, out, out_shape->batches, arguments);
      error.failure()) {
    return error;
  }
  auto const [groups, k, n] = out_shape->size;
  int const m = lhs_shape->size[transpose_lhs ? 1 : 0];
  if (auto error = lhs_shape->expect(matrix(m, k, transpose_lhs), arguments.batches);
      error.failure()) {
    return error;
  }
  if (auto error = rhs_shape->expect(matrix(m, n, transpose_rhs), arguments.batches);
      error.failure()) {
    return error;
  }

  arguments.transpose_lhs = transpose_lhs;
  arguments.transpose_rhs = transpose_rhs;
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.local_groups = groups;
  arguments.m = m;
  arguments.k = k;
  arguments.n = n;
  arguments.contracting = true;
  return ffi::Error::Success();
}

ffi::Error ragged_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                              Sizes group_sizes, Sizes group_offset,
                              ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                              bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                              int32_t tile_n, int32_t cluster, bool stream_k, int32_t terms) {
  TileConfig const config{tile_m, tile_n, cluster, stream_k};
  RaggedDotArguments arguments{};
  if (auto error = contracting_arguments(lhs, rhs, group_sizes, group_offset, *out, transpose_lhs,
                                         transpose_rhs, arguments);
      error.failure()) {
    return error;
  }
  if (auto error = use_workspace(workspace, config, terms, arguments); error.failure())
    return error;
  return launched(sm90::ragged_contracting(config, arguments, stream), "ragged_contracting");
}

ffi::Error ragged_accumulate(cudaStream_t stream, ffi::AnyBuffer accumulator, ffi::AnyBuffer lhs,
                             ffi::AnyBuffer rhs, Sizes group_sizes, Sizes group_offset,
                             ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                             bool transpose_lhs, bool transpose_rhs, int32_t tile_m, int32_t tile_n,
                             int32_t cluster) {
  TileConfig const config{tile_m, tile_n, cluster, false};
  RaggedDotArguments arguments{};
  if (auto error = contracting_arguments(lhs, rhs, group_sizes, group_offset, *out, transpose_lhs,
                                         transpose_rhs, arguments);
      error.failure()) {
    return error;
  }
  if (arguments.type == ElementType::kF32 || arguments.out_type != ElementType::kF32) {
    return invalid("the kernels add products of bf16 or f16 to f32");
  }
  if (accumulator.untyped_data() != arguments.out) {
    return invalid("the accumulator is not aliased to the result");
  }
  arguments.accumulate = true;
  if (auto error = use_workspace(workspace, config, 0, arguments); error.failure()) return error;
  return launched(sm90::ragged_contracting(config, arguments, stream), "ragged_accumulate");
}

// Buffers and attributes of the products that write their results. The workspace is where the parts
// of float32 operands and partial sums go: XLA plans it with its own temporaries, and its address
// outlives a captured graph.
auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()        // lhs
      .Arg<ffi::AnyBuffer>()        // rhs
      .Arg<Sizes>()                 // group_sizes
      .Arg<Sizes>()                 // group_offset
      .Ret<ffi::AnyBuffer>()        // out
      .Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attr<bool>("transpose_lhs")
      .Attr<bool>("transpose_rhs")
      .Attr<int32_t>("tile_m")
      .Attr<int32_t>("tile_n")
      .Attr<int32_t>("cluster")
      .Attr<bool>("stream_k")
      .Attr<int32_t>("terms");  // see RaggedDotArguments
}

auto accumulate_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()        // accumulator
      .Arg<ffi::AnyBuffer>()        // lhs
      .Arg<ffi::AnyBuffer>()        // rhs
      .Arg<Sizes>()                 // group_sizes
      .Arg<Sizes>()                 // group_offset
      .Ret<ffi::AnyBuffer>()        // out, aliased to the accumulator
      .Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attr<bool>("transpose_lhs")
      .Attr<bool>("transpose_rhs")
      .Attr<int32_t>("tile_m")
      .Attr<int32_t>("tile_n")
      .Attr<int32_t>("cluster");
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRaggedNoncontracting, jgg::ragged_noncontracting, jgg::binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRaggedContracting, jgg::ragged_contracting, jgg::binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRaggedAccumulate, jgg::ragged_accumulate,
                              jgg::accumulate_binding(), {xla::ffi::Traits::kCmdBufferCompatible});
