// Bindings of the ragged products: check the buffers, read the sizes, launch.
#include "ragged/ragged_dot.h"

#include <array>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/workspace.h"
#include "ragged/parts_workspace.h"

namespace jgg {
namespace {

std::array<int, 2> matrix(int rows, int columns, bool transpose) {
  return transpose ? std::array<int, 2>{columns, rows} : std::array<int, 2>{rows, columns};
}

// Sets the workspace and the accuracy of float32 operands, once the sizes are known. The workspace
// holds the parts of float32 operands, and partial sums. XLA allocates the workspace together with
// its own temporaries, so the address stays valid in a captured graph.
void use_workspace(Call& call, WorkspaceResult workspace, TileConfig tile, RaggedDotArguments& a) {
  int const terms = call.get<int32_t>("terms", 0);
  set_workspace(workspace, a);
  if (tile.kind == KernelKind::kStreamK) expect_room_for_sums(call, a.workspace_bytes, tile);
  if (a.type != ElementType::kF32) return;
  a.accuracy = accuracy_of(call, terms);
  if (call.failed() || tile.kind == KernelKind::kSwapped) return;  // its kernels split operands
  expect_room_for_parts(call, a.workspace_bytes, RaggedWorkspace(a).bytes());
}

// Returns the arguments of either product. Attributes with a default may be missing, because only
// some products have them.
template <bool kContracting>
RaggedDotArguments arguments_of(Call& call, TileConfig tile, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                Sizes group_sizes, Sizes group_offset, ffi::AnyBuffer out,
                                WorkspaceResult workspace) {
  RaggedDotArguments a{};
  a.contracting = kContracting;
  a.transpose_lhs = call.get<bool>("transpose_lhs");
  a.transpose_rhs = call.get<bool>("transpose_rhs");
  a.max_sms = call.max_sms();
  bool const zeroes_unowned = call.get<bool>("zeroes_unowned", true);
  auto const lhs_shape = call.shape<2>("lhs", lhs);
  auto const rhs_shape = call.shape<kContracting ? 2 : 3>("rhs", rhs);
  auto const out_shape = call.shape<kContracting ? 3 : 2>("out", out);
  int const batches = out_shape.batches;
  int local_groups, m;
  if constexpr (kContracting) {
    m = lhs_shape.size[a.transpose_lhs ? 1 : 0];
    local_groups = out_shape.size[0], a.k = out_shape.size[1], a.n = out_shape.size[2];
    call.expect(rhs_shape, matrix(m, a.n, a.transpose_rhs), batches);
  } else {
    m = out_shape.size[0], a.n = out_shape.size[1];
    local_groups = rhs_shape.size[0], a.k = lhs_shape.size[a.transpose_lhs ? 0 : 1];
    auto const [rows, columns] = matrix(a.k, a.n, a.transpose_rhs);
    call.expect(rhs_shape, {local_groups, rows, columns}, batches);
  }
  call.expect(lhs_shape, matrix(m, a.k, a.transpose_lhs), batches);
  a.groups = groups_of(call, group_sizes, group_offset, batches, local_groups, m,
                       kContracting || zeroes_unowned);
  if (rhs.element_type() != lhs.element_type() ||
      !are_products(lhs.element_type(), out.element_type(), a.type, a.out_type)) {
    call.fail("the kernels multiply bf16, f16 or f32 into the same type or f32");
  }
  call.expect_operand_vectors("lhs", lhs);
  call.expect_operand_vectors("rhs", rhs);
  call.expect_vectors("the result", out);
  a.lhs = lhs.untyped_data();
  a.rhs = rhs.untyped_data();
  a.out = out.untyped_data();
  a.lhs_batched = lhs_shape.batched;
  a.rhs_batched = rhs_shape.batched;
  use_workspace(call, workspace, tile, a);
  return a;
}

template <bool kContracting>
ffi::Error product(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, Sizes group_sizes,
                   Sizes group_offset, ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                   ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  auto const a =
      arguments_of<kContracting>(call, tile, lhs, rhs, group_sizes, group_offset, *out, workspace);
  if (call.failed()) return call.error();
  if (kContracting) return launched(ragged_contracting(tile, a, stream), "ragged_contracting");
  return launched(ragged_noncontracting(tile, a, stream), "ragged_noncontracting");
}

// Adds a product to the accumulator, whose memory the result shares.
ffi::Error accumulate(cudaStream_t stream, ffi::AnyBuffer accumulator, ffi::AnyBuffer lhs,
                      ffi::AnyBuffer rhs, Sizes group_sizes, Sizes group_offset,
                      ffi::Result<ffi::AnyBuffer> out, WorkspaceResult workspace,
                      ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  auto a = arguments_of<true>(call, tile, lhs, rhs, group_sizes, group_offset, *out, workspace);
  if (a.type == ElementType::kF32 || a.out_type != ElementType::kF32) {
    call.fail("the kernels add products of bf16 or f16 to f32");
  }
  if (accumulator.untyped_data() != a.out) {
    call.fail("the accumulator is not aliased to the result");
  }
  if (call.failed()) return call.error();
  a.accumulate = true;
  return launched(ragged_contracting(tile, a, stream), "ragged_accumulate");
}

Handler<product<false>> const noncontracting_handler{"ragged_noncontracting.v4"};
Handler<product<true>> const contracting_handler{"ragged_contracting.v4"};
Handler<accumulate> const accumulate_handler{"ragged_accumulate.v1"};

}  // namespace
}  // namespace jgg
