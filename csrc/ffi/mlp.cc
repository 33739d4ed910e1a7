// Bindings of the kernels of an expert MLP: check the buffers, read the sizes, launch.
#include <initializer_list>
#include <string>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/workspace.h"
#include "mlp/gated_ragged_dot.h"

namespace jgg {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

// Sets `type` to the type of all buffers. Fails if types differ or TMA cannot address the rows.
void check_matrices(Call& call, ElementType& type, std::initializer_list<ffi::AnyBuffer> buffers) {
  type =
      call.type(*buffers.begin(), {ElementType::kBf16}, "the kernels of an expert MLP take bf16");
  for (ffi::AnyBuffer const& buffer : buffers) {
    if (buffer.element_type() != buffers.begin()->element_type())
      call.fail("operands and results differ in type");
    call.expect_vectors("an operand or a result", buffer);
  }
}

// Computes the gradients of gate, of up and of the rows' weights, and hidden again. Without up,
// `up` and `dup` have one row, which is neither read nor written. The workspace is unused, but
// every call of a ragged product has one.
ffi::Error gated_gradient(cudaStream_t stream, ffi::AnyBuffer dy, Sizes rows,
                          ffi::AnyBuffer down_weights, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                          Floats weights, Sizes group_sizes, Sizes group_offset, Result dgate,
                          Result dup, Result hidden, ffi::Result<Floats> dweights, WorkspaceResult,
                          ffi::Dictionary attributes) {
  Call call(attributes);
  mlp::GradientArguments a{};
  auto const has_weights = call.get<bool>("has_weights"), has_up = call.get<bool>("has_up");
  auto const has_rows = call.get<bool>("has_rows");
  a.divisor = call.divisor();
  auto const zeroes_unowned = call.get<bool>("zeroes_unowned");
  auto const function = call.get<int32_t>("function");
  a.activation = call.activation(static_cast<mlp::Function>(function));
  a.max_sms = call.max_sms();
  TileConfig const tile = call.tile(KernelKind::kPingpong);
  int const tile_n = tile.tile_n;
  if (tile_n <= 0) call.fail("tile_n must be positive, got " + std::to_string(tile_n));
  if (function < 0 || function > static_cast<int>(mlp::Function::kSquaredRelu)) {
    call.fail("no function has the number " + std::to_string(function));
  }
  if (call.failed()) return call.error();
  auto const [tokens, k] = call.size<2>("dy", dy);
  auto const [m, n] = call.size<2>("gate", gate);
  auto const [local_groups, depth, columns] = call.size<3>("the down projection", down_weights);
  call.expect<2>("dy", dy, {has_rows ? tokens : m, k});
  call.expect<1>("rows", rows, {has_rows ? m : 1});
  call.expect<3>("the down projection", down_weights, {local_groups, n, k});
  call.expect<2>("up", up, {has_up ? m : 1, n});
  call.expect<1>("weights", weights, {has_weights ? m : 1});
  a.groups = groups_of(call, group_sizes, group_offset, 1, local_groups, m, zeroes_unowned);
  call.expect<2>("dgate", *dgate, {m, n});
  call.expect<2>("dup", *dup, {has_up ? m : 1, n});
  call.expect<2>("hidden", *hidden, {m, n});
  call.expect<2>("dweights", *dweights, {n / tile_n + (n % tile_n != 0), m});
  check_matrices(call, a.type, {dy, down_weights, gate, up, *dgate, *dup, *hidden});
  if (call.failed()) return call.error();

  a.dy = dy.untyped_data();
  a.rows = has_rows ? rows.typed_data() : nullptr;
  a.tokens = tokens;
  a.down_weights = down_weights.untyped_data();
  a.gate = gate.untyped_data();
  a.up = has_up ? up.untyped_data() : nullptr;
  a.weights = has_weights ? weights.typed_data() : nullptr;
  a.dgate = dgate->untyped_data();
  a.dup = has_up ? dup->untyped_data() : nullptr;
  a.hidden = hidden->untyped_data();
  a.dweights = dweights->typed_data();
  a.k = k;
  a.n = n;
  return launched(mlp::gated_gradient(tile, a, stream), "gated_ragged_dot_transpose");
}

// The workspace is unused, as in gated_gradient().
ffi::Error paired_ragged_dot(cudaStream_t stream, ffi::AnyBuffer first_lhs,
                             ffi::AnyBuffer second_lhs, ffi::AnyBuffer first_rhs,
                             ffi::AnyBuffer second_rhs, Sizes group_sizes, Sizes group_offset,
                             Result out, WorkspaceResult, ffi::Dictionary attributes) {
  Call call(attributes);
  mlp::PairedArguments a{};
  auto const zeroes_unowned = call.get<bool>("zeroes_unowned");
  a.max_sms = call.max_sms();
  TileConfig const tile = call.tile();
  auto const [m, k] = call.size<2>("the first lhs", first_lhs);
  auto const [local_groups, n, depth] = call.size<3>("the first rhs", first_rhs);
  call.expect<2>("the second lhs", second_lhs, {m, k});
  call.expect<3>("the first rhs", first_rhs, {local_groups, n, k});
  call.expect<3>("the second rhs", second_rhs, {local_groups, n, k});
  a.groups = groups_of(call, group_sizes, group_offset, 1, local_groups, m, zeroes_unowned);
  call.expect<2>("out", *out, {m, n});
  check_matrices(call, a.type, {first_lhs, second_lhs, first_rhs, second_rhs, *out});
  if (call.failed()) return call.error();

  a.lhs[0] = first_lhs.untyped_data();
  a.lhs[1] = second_lhs.untyped_data();
  a.rhs[0] = first_rhs.untyped_data();
  a.rhs[1] = second_rhs.untyped_data();
  a.out = out->untyped_data();
  a.k = k;
  a.n = n;
  return launched(mlp::paired_ragged_dot(tile, a, stream), "paired_ragged_dot");
}

ffi::Error weight_gradients(cudaStream_t stream, ffi::AnyBuffer x, Sizes rows,
                            ffi::AnyBuffer first_rhs, ffi::AnyBuffer second_rhs, Sizes group_sizes,
                            Sizes group_offset, Result first_out, Result second_out,
                            WorkspaceResult workspace, ffi::Dictionary attributes) {
  Call call(attributes);
  mlp::WeightGradientArguments a{};
  auto const has_rows = call.get<bool>("has_rows");
  a.divisor = call.divisor();
  a.max_sms = call.max_sms();
  TileConfig const tile = call.tile();
  auto const [tokens, k] = call.size<2>("x", x);
  auto const [m, n] = call.size<2>("the first rhs", first_rhs);
  auto const [local_groups, columns, depth] = call.size<3>("the first result", *first_out);
  call.expect<2>("x", x, {has_rows ? tokens : m, k});
  call.expect<1>("rows", rows, {has_rows ? m : 1});
  call.expect<2>("the second rhs", second_rhs, {m, n});
  call.expect<3>("the first result", *first_out, {local_groups, k, n});
  call.expect<3>("the second result", *second_out, {local_groups, k, n});
  a.groups = groups_of(call, group_sizes, group_offset, 1, local_groups, m);
  check_matrices(call, a.type, {x, first_rhs, second_rhs, *first_out, *second_out});
  if (call.failed()) return call.error();

  a.x = x.untyped_data();
  a.rows = has_rows ? rows.typed_data() : nullptr;
  a.tokens = tokens;
  a.rhs[0] = first_rhs.untyped_data();
  a.rhs[1] = second_rhs.untyped_data();
  a.out[0] = first_out->untyped_data();
  a.out[1] = second_out->untyped_data();
  set_workspace(workspace, a);
  a.k = k;
  a.n = n;
  return launched(mlp::weight_gradients(tile, a, stream), "paired_weight_gradients");
}

// Computes the gradient [local_groups, n, k] of the down projection from hidden and the rows of dy.
// The workspace is used only if groups are unequal.
ffi::Error down_weight_gradient(cudaStream_t stream, ffi::AnyBuffer dy, Sizes rows,
                                ffi::AnyBuffer hidden, Sizes group_sizes, Sizes group_offset,
                                Result out, WorkspaceResult workspace, ffi::Dictionary attributes) {
  Call call(attributes);
  mlp::WeightGradientArguments a{};
  a.divisor = call.divisor();
  a.max_sms = call.max_sms();
  TileConfig const tile = call.tile();
  auto const [tokens, k] = call.size<2>("dy", dy);
  auto const [m, n] = call.size<2>("hidden", hidden);
  auto const [local_groups, depth, columns] = call.size<3>("the result", *out);
  call.expect<1>("rows", rows, {m});
  call.expect<3>("the result", *out, {local_groups, n, k});
  a.groups = groups_of(call, group_sizes, group_offset, 1, local_groups, m);
  check_matrices(call, a.type, {dy, hidden, *out});
  if (call.failed()) return call.error();

  a.x = dy.untyped_data();
  a.rows = rows.typed_data();
  a.tokens = tokens;
  a.rhs[0] = hidden.untyped_data();
  a.out[0] = out->untyped_data();
  set_workspace(workspace, a);
  a.k = k;
  a.n = n;
  return launched(mlp::weight_gradients(tile, a, stream), "down_weight_gradient");
}

Handler<gated_gradient> const gradient_handler{"gated_ragged_dot_transpose.v5"};
Handler<paired_ragged_dot> const paired_handler{"paired_ragged_dot.v2"};
Handler<down_weight_gradient> const down_handler{"down_weight_gradient.v1"};
Handler<weight_gradients> const weight_gradients_handler{"paired_weight_gradients.v1"};

}  // namespace
}  // namespace jgg
