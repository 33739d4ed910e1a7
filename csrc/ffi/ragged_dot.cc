// Bindings of the ragged products: check the buffers, name the sizes, launch.
#include "ragged/ragged_dot.h"

#include <array>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/float32_workspace.h"
#include "ffi/groups.h"
#include "ffi/partial_sums.h"
#include "ragged/parts_workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

// The attributes of a product. Attributes with a default belong to some products only.
struct RaggedAttributes {
  bool transpose_lhs;
  bool transpose_rhs;
  TileConfig tile;
  int terms;  // see accuracy_of()
  bool zeroes_unowned;
  int max_sms;

  static ffi::ErrorOr<RaggedAttributes> of(ffi::Dictionary attributes) {
    Attributes given(attributes);
    RaggedAttributes const asked{
        given.get<bool>("transpose_lhs"), given.get<bool>("transpose_rhs"),        given.tile(),
        given.get<int32_t>("terms", 0),   given.get<bool>("zeroes_unowned", true), given.max_sms()};
    if (given.error().failure()) return ffi::Unexpected(given.error());
    return asked;
  }
};

std::array<int, 2> matrix(int rows, int columns, bool transpose) {
  return transpose ? std::array<int, 2>{columns, rows} : std::array<int, 2>{rows, columns};
}

// The part that the products have in common: types, pointers, group sizes, and how operands lie in
// memory.
ffi::Error common_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::AnyBuffer out,
                            ffi::ErrorOr<GroupSizes> const& groups, RaggedAttributes const& asked,
                            RaggedDotArguments& arguments) {
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
  arguments.transpose_lhs = asked.transpose_lhs;
  arguments.transpose_rhs = asked.transpose_rhs;
  arguments.max_sms = asked.max_sms;
  return ffi::Error::Success();
}

ffi::ErrorOr<RaggedDotArguments> noncontracting_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                                          Sizes group_sizes, Sizes group_offset,
                                                          ffi::AnyBuffer out,
                                                          RaggedAttributes const& asked) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return ffi::Unexpected(lhs_shape.error());
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return ffi::Unexpected(rhs_shape.error());
  auto const out_shape = Shape<2>::of("out", out);
  if (!out_shape) return ffi::Unexpected(out_shape.error());

  RaggedDotArguments arguments{};
  auto const [m, n] = out_shape->size;
  int const k = lhs_shape->size[asked.transpose_lhs ? 0 : 1], local_groups = rhs_shape->size[0];
  int const batches = out_shape->batches;
  auto const groups =
      groups_of(group_sizes, group_offset, batches, local_groups, m, asked.zeroes_unowned);
  for (auto error :
       {common_arguments(lhs, rhs, out, groups, asked, arguments),
        lhs_shape->expect(matrix(m, k, asked.transpose_lhs), batches),
        rhs_shape->expect({local_groups, asked.transpose_rhs ? n : k, asked.transpose_rhs ? k : n},
                          batches)}) {
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
                                                       ffi::AnyBuffer out,
                                                       RaggedAttributes const& asked) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return ffi::Unexpected(lhs_shape.error());
  auto const rhs_shape = Shape<2>::of("rhs", rhs);
  if (!rhs_shape) return ffi::Unexpected(rhs_shape.error());
  auto const out_shape = Shape<3>::of("out", out);
  if (!out_shape) return ffi::Unexpected(out_shape.error());

  RaggedDotArguments arguments{};
  auto const [local_groups, k, n] = out_shape->size;
  int const m = lhs_shape->size[asked.transpose_lhs ? 1 : 0], batches = out_shape->batches;
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  for (auto error : {common_arguments(lhs, rhs, out, groups, asked, arguments),
                     lhs_shape->expect(matrix(m, k, asked.transpose_lhs), batches),
                     rhs_shape->expect(matrix(m, n, asked.transpose_rhs), batches)}) {
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
ffi::Error use_workspace(WorkspaceResult workspace, RaggedAttributes const& asked,
                         RaggedDotArguments& arguments) {
  arguments.workspace = workspace->typed_data();
  arguments.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  if (asked.tile.kind == KernelKind::kStreamK) {
    if (auto error = sums_fit(arguments.workspace_bytes, asked.tile); error.failure()) return error;
  }
  if (arguments.type != ElementType::kF32) return ffi::Error::Success();
  auto const accuracy = accuracy_of(asked.terms);
  if (!accuracy) return accuracy.error();
  arguments.accuracy = *accuracy;
  if (asked.tile.kind == KernelKind::kSwapped) return ffi::Error::Success();  // splits on the way
  return parts_fit(arguments.workspace_bytes, RaggedWorkspace(arguments).bytes());
}

ffi::Error on_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                             Sizes group_sizes, Sizes group_offset, ffi::Result<ffi::AnyBuffer> out,
                             WorkspaceResult workspace, ffi::Dictionary attributes) {
  auto const asked = RaggedAttributes::of(attributes);
  if (!asked) return asked.error();
  auto arguments = noncontracting_arguments(lhs, rhs, group_sizes, group_offset, *out, *asked);
  if (!arguments) return arguments.error();
  if (auto error = use_workspace(workspace, *asked, *arguments); error.failure()) return error;
  return launched(ragged_noncontracting(asked->tile, *arguments, stream), "ragged_noncontracting");
}

ffi::Error on_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                          Sizes group_sizes, Sizes group_offset, ffi::Result<ffi::AnyBuffer> out,
                          WorkspaceResult workspace, ffi::Dictionary attributes) {
  auto const asked = RaggedAttributes::of(attributes);
  if (!asked) return asked.error();
  auto arguments = contracting_arguments(lhs, rhs, group_sizes, group_offset, *out, *asked);
  if (!arguments) return arguments.error();
  if (auto error = use_workspace(workspace, *asked, *arguments); error.failure()) return error;
  return launched(ragged_contracting(asked->tile, *arguments, stream), "ragged_contracting");
}

ffi::Error on_accumulate(cudaStream_t stream, ffi::AnyBuffer accumulator, ffi::AnyBuffer lhs,
                         ffi::AnyBuffer rhs, Sizes group_sizes, Sizes group_offset,
                         ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                         ffi::Dictionary attributes) {
  auto const asked = RaggedAttributes::of(attributes);
  if (!asked) return asked.error();
  auto arguments = contracting_arguments(lhs, rhs, group_sizes, group_offset, *out, *asked);
  if (!arguments) return arguments.error();
  if (arguments->type == ElementType::kF32 || arguments->out_type != ElementType::kF32) {
    return invalid("the kernels add products of bf16 or f16 to f32");
  }
  if (accumulator.untyped_data() != arguments->out) {
    return invalid("the accumulator is not aliased to the result");
  }
  arguments->accumulate = true;
  if (auto error = use_workspace(workspace, *asked, *arguments); error.failure()) return error;
  return launched(ragged_contracting(asked->tile, *arguments, stream), "ragged_accumulate");
}

Handler<on_noncontracting> const noncontracting_handler{"ragged_noncontracting.v4"};
Handler<on_contracting> const contracting_handler{"ragged_contracting.v4"};
Handler<on_accumulate> const accumulate_handler{"ragged_accumulate.v1"};

}  // namespace
}  // namespace jgg
