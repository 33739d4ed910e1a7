// Bindings of the ragged products: check the buffers, name the sizes, launch.
#include "ragged/ragged_dot.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/float32_workspace.h"
#include "ffi/groups.h"
#include "ffi/kernel_kind.h"
#include "ffi/partial_sums.h"
#include "ragged/parts_workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using sm90::RaggedDotArguments;

std::array<int, 2> matrix(int rows, int columns, bool transpose) {
  return transpose ? std::array<int, 2>{columns, rows} : std::array<int, 2>{rows, columns};
}

// The part that the products have in common: types, pointers, group sizes, and how operands lie in
// memory.
ffi::Error common_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer out,
                            ffi::ErrorOr<GroupSizes> const& groups, bool transpose_lhs,
                            bool transpose_rhs, RaggedDotArguments& arguments) {
  if (!groups) return groups.error();
  if (rhs.element_type() != lhs.element_type() ||
      !are_products(lhs.element_type(), out.element_type(), arguments.type, arguments.out_type)) {
    return invalid("the kernels multiply bf16, f16 or f32 into the same type or f32");
  }
  for (auto error : {operand_vectors("lhs", lhs), operand_vectors("rhs", rhs),
                     whole_vectors("the result", out)}) {
    if (error.failure()) return error;
  }
  arguments.lhs = lhs.untyped_data();
  arguments.rhs = rhs.untyped_data();
  arguments.out = out.untyped_data();
  arguments.groups = *groups;
  arguments.transpose_lhs = transpose_lhs;
  arguments.transpose_rhs = transpose_rhs;
  return ffi::Error::Success();
}

ffi::ErrorOr<RaggedDotArguments> noncontracting_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                                          Sizes group_sizes, Sizes group_offset,
                                                          ffi::AnyBuffer out, bool transpose_lhs,
                                                          bool transpose_rhs, bool zeroes_unowned) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return ffi::Unexpected(lhs_shape.error());
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return ffi::Unexpected(rhs_shape.error());
  auto const out_shape = Shape<2>::of("out", out);
  if (!out_shape) return ffi::Unexpected(out_shape.error());

  RaggedDotArguments arguments{};
  auto const [m, n] = out_shape->size;
  int const k = lhs_shape->size[transpose_lhs ? 0 : 1], local_groups = rhs_shape->size[0];
  int const batches = out_shape->batches;
  auto const groups =
      groups_of(group_sizes, group_offset, batches, local_groups, m, zeroes_unowned);
  for (auto error :
       {common_arguments(lhs, rhs, out, groups, transpose_lhs, transpose_rhs, arguments),
        lhs_shape->expect(matrix(m, k, transpose_lhs), batches),
        rhs_shape->expect({local_groups, transpose_rhs ? n : k, transpose_rhs ? k : n}, batches)}) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.k = k;
  arguments.n = n;
  arguments.contracting = false;
  return arguments;
}

ffi::ErrorOr<RaggedDotArguments> contracting_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                                       Sizes group_sizes, Sizes group_offset,
                                                       ffi::AnyBuffer out, bool transpose_lhs,
                                                       bool transpose_rhs) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return ffi::Unexpected(lhs_shape.error());
  auto const rhs_shape = Shape<2>::of("rhs", rhs);
  if (!rhs_shape) return ffi::Unexpected(rhs_shape.error());
  auto const out_shape = Shape<3>::of("out", out);
  if (!out_shape) return ffi::Unexpected(out_shape.error());

  RaggedDotArguments arguments{};
  auto const [local_groups, k, n] = out_shape->size;
  int const m = lhs_shape->size[transpose_lhs ? 1 : 0], batches = out_shape->batches;
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  for (auto error :
       {common_arguments(lhs, rhs, out, groups, transpose_lhs, transpose_rhs, arguments),
        lhs_shape->expect(matrix(m, k, transpose_lhs), batches),
        rhs_shape->expect(matrix(m, n, transpose_rhs), batches)}) {
    if (error.failure()) return ffi::Unexpected(error);
  }
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.k = k;
  arguments.n = n;
  arguments.contracting = true;
  return arguments;
}

// Takes over the workspace and what is asked of float32 operands, once the sizes are known.
ffi::Error use_workspace(WorkspaceResult workspace, TileConfig tile, int terms,
                         RaggedDotArguments& arguments) {
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  if (tile.kind == KernelKind::kStreamK) {
    if (auto error = sums_fit(arguments.workspace_bytes, tile); error.failure()) return error;
  }
  if (arguments.type != ElementType::kF32) return ffi::Error::Success();
  auto const accuracy = accuracy_of(terms);
  if (!accuracy) return accuracy.error();
  arguments.accuracy = *accuracy;
  if (tile.kind == KernelKind::kSwapped) return ffi::Error::Success();  // splits on the way
  return parts_fit(arguments.workspace_bytes, sm90::RaggedWorkspace(arguments).bytes());
}

ffi::Error ragged_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                 Sizes group_sizes, Sizes group_offset,
                                 ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                                 bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                                 int32_t tile_n, int32_t cluster, std::string_view kind,
                                 int32_t terms, bool zeroes_unowned) {
  auto const tile = tile_config(tile_m, tile_n, cluster, kind);
  if (!tile) return tile.error();
  auto arguments = noncontracting_arguments(lhs, rhs, group_sizes, group_offset, *out,
                                            transpose_lhs, transpose_rhs, zeroes_unowned);
  if (!arguments) return arguments.error();
  if (auto error = use_workspace(workspace, *tile, terms, *arguments); error.failure()) {
    return error;
  }
  return launched(sm90::ragged_noncontracting(*tile, *arguments, stream), "ragged_noncontracting");
}

ffi::Error ragged_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                              Sizes group_sizes, Sizes group_offset,
                              ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                              bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                              int32_t tile_n, int32_t cluster, std::string_view kind,
                              int32_t terms) {
  auto const tile = tile_config(tile_m, tile_n, cluster, kind);
  if (!tile) return tile.error();
  auto arguments = contracting_arguments(lhs, rhs, group_sizes, group_offset, *out, transpose_lhs,
                                         transpose_rhs);
  if (!arguments) return arguments.error();
  if (auto error = use_workspace(workspace, *tile, terms, *arguments); error.failure()) {
    return error;
  }
  return launched(sm90::ragged_contracting(*tile, *arguments, stream), "ragged_contracting");
}

ffi::Error ragged_accumulate(cudaStream_t stream, ffi::AnyBuffer accumulator, ffi::AnyBuffer lhs,
                             ffi::AnyBuffer rhs, Sizes group_sizes, Sizes group_offset,
                             ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                             bool transpose_lhs, bool transpose_rhs, int32_t tile_m, int32_t tile_n,
                             int32_t cluster) {
  auto arguments = contracting_arguments(lhs, rhs, group_sizes, group_offset, *out, transpose_lhs,
                                         transpose_rhs);
  if (!arguments) return arguments.error();
  if (arguments->type == ElementType::kF32 || arguments->out_type != ElementType::kF32) {
    return invalid("the kernels add products of bf16 or f16 to f32");
  }
  if (accumulator.untyped_data() != arguments->out) {
    return invalid("the accumulator is not aliased to the result");
  }
  arguments->accumulate = true;
  TileConfig const tile{tile_m, tile_n, cluster};
  if (auto error = use_workspace(workspace, tile, 0, *arguments); error.failure()) return error;
  return launched(sm90::ragged_contracting(tile, *arguments, stream), "ragged_accumulate");
}

// Targets without the attributes `kind` and `zeroes_unowned`.
ffi::Error ragged_noncontracting_v3(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                    Sizes group_sizes, Sizes group_offset,
                                    ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                                    bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                                    int32_t tile_n, int32_t cluster, bool stream_k, int32_t terms) {
  return ragged_noncontracting(stream, lhs, rhs, group_sizes, group_offset, out, workspace,
                               transpose_lhs, transpose_rhs, tile_m, tile_n, cluster,
                               stream_k ? "stream_k" : kind_of_size(tile_m == 64, "swapped"), terms,
                               /*zeroes_unowned=*/true);
}

ffi::Error ragged_contracting_v3(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                 Sizes group_sizes, Sizes group_offset,
                                 ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                                 bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                                 int32_t tile_n, int32_t cluster, bool /*stream_k*/,
                                 int32_t terms) {
  return ragged_contracting(stream, lhs, rhs, group_sizes, group_offset, out, workspace,
                            transpose_lhs, transpose_rhs, tile_m, tile_n, cluster,
                            kind_of_size(tile_n == 192, "pingpong"), terms);
}

// What the products have in common. The workspace is where the parts of float32 operands and
// partial sums go: XLA plans it with its own temporaries, and its address outlives a captured
// graph.
template <class Operands>
auto with_operands(Operands operands) {
  return with_tile_attributes(std::move(operands)
                                  .template Arg<ffi::AnyBuffer>()        // lhs
                                  .template Arg<ffi::AnyBuffer>()        // rhs
                                  .template Arg<Sizes>()                 // group_sizes
                                  .template Arg<Sizes>()                 // group_offset
                                  .template Ret<ffi::AnyBuffer>()        // out
                                  .template Ret<ffi::Buffer<ffi::U8>>()  // workspace
                                  .template Attr<bool>("transpose_lhs")
                                  .template Attr<bool>("transpose_rhs"));
}

// `terms`: see accuracy_of()
auto binding() {
  return with_operands(on_stream()).Attr<std::string_view>("kind").Attr<int32_t>("terms");
}
auto noncontracting_binding() { return binding().Attr<bool>("zeroes_unowned"); }
auto binding_v3() {
  return with_operands(on_stream()).Attr<bool>("stream_k").Attr<int32_t>("terms");
}

// The result is aliased to the accumulator.
auto accumulate_binding() { return with_operands(on_stream().Arg<ffi::AnyBuffer>()); }

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggRaggedNoncontracting, jgg::ragged_noncontracting,
                   jgg::noncontracting_binding());
JGG_DEFINE_HANDLER(JggRaggedContracting, jgg::ragged_contracting, jgg::binding());
JGG_DEFINE_HANDLER(JggRaggedAccumulate, jgg::ragged_accumulate, jgg::accumulate_binding());
JGG_DEFINE_HANDLER(JggRaggedNoncontractingV3, jgg::ragged_noncontracting_v3, jgg::binding_v3());
JGG_DEFINE_HANDLER(JggRaggedContractingV3, jgg::ragged_contracting_v3, jgg::binding_v3());
