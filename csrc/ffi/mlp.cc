// Bindings of the kernels of an expert MLP: check the buffers, name the sizes, launch.
#include <array>
#include <string>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "mlp/gated_ragged_dot.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::Result<ffi::AnyBuffer>;
using WorkspaceResult = ffi::Result<ffi::Buffer<ffi::U8>>;

// Checks buffers of one product one after the other, and keeps what is wrong with the first that
// does not fit.
class Check {
 public:
  template <int kRank, class Buffer>
  void shape(char const* name, Buffer const& buffer, std::array<int, kRank> expected) {
    if (failed_) return;
    if (auto error = has_shape<kRank>(name, buffer, expected); error.failure()) fail(error);
  }

  template <int kRank, class Buffer>
  std::array<int, kRank> size(char const* name, Buffer const& buffer) {
    if (failed_) return {};
    auto const shape = Shape<kRank>::of(name, buffer);
    if (!shape) {
      fail(shape.error());
      return {};
    }
    if (shape->batched) fail(invalid(std::string(name) + " has a batch dimension"));
    return shape->size;
  }

  // All of the type of the first, in rows that TMA can address.
  void matrices(ElementType& type, std::initializer_list<ffi::AnyBuffer> buffers) {
    if (failed_) return;
    ffi::DataType const first = buffers.begin()->element_type();
    bool const known = element_type(first, {ElementType::kBf16}, type);
    if (!known) return fail(invalid("the kernels of an expert MLP take bf16"));
    for (ffi::AnyBuffer const& buffer : buffers) {
      if (buffer.element_type() != first) {
        return fail(invalid("operands and results differ in type"));
      }
      auto const error = whole_vectors("an operand or a result", buffer);
      if (error.failure()) return fail(error);
    }
  }

  void groups(GroupSizes& result, Sizes group_sizes, Sizes group_offset, int local_groups, int rows,
              bool zeroes_unowned) {
    if (failed_) return;
    auto const groups = groups_of(group_sizes, group_offset, 1, local_groups, rows, zeroes_unowned);
    if (!groups) return fail(groups.error());
    result = *groups;
  }

  bool failed() const { return failed_; }
  ffi::Error error() const { return error_; }

 private:
  void fail(ffi::Error error) {
    failed_ = true;
    error_ = error;
  }

  bool failed_ = false;
  ffi::Error error_ = ffi::Error::Success();
};

// Without up, that and its gradient have one row, which nobody reads or writes.
ffi::Error gated_gradient(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer down_weights,
                          ffi::AnyBuffer gate, ffi::AnyBuffer up, Floats weights, Sizes group_sizes,
                          Sizes group_offset, Result dgate, Result dup, Result hidden,
                          ffi::Result<Floats> dweights, WorkspaceResult,
                          ffi::Dictionary attributes) {
  Attributes given(attributes);
  Check check;
  mlp::GradientArguments a{};
  auto const has_weights = given.get<bool>("has_weights"), has_up = given.get<bool>("has_up");
  auto const zeroes_unowned = given.get<bool>("zeroes_unowned");
  auto const function = given.get<int32_t>("function");
  a.activation = given.activation(static_cast<mlp::Function>(function));
  a.max_sms = given.max_sms();
  TileConfig const tile = given.tile(KernelKind::kPingpong);
  if (given.error().failure()) return given.error();
  auto const [m, k] = check.size<2>("dy", dy);
  auto const [local_groups, n, columns] = check.size<3>("the down projection", down_weights);
  check.shape<3>("the down projection", down_weights, {local_groups, n, k});
  check.shape<2>("gate", gate, {m, n});
  check.shape<2>("up", up, {has_up ? m : 1, n});
  check.shape<1>("weights", weights, {has_weights ? m : 1});
  check.groups(a.groups, group_sizes, group_offset, local_groups, m, zeroes_unowned);
  check.shape<2>("dgate", *dgate, {m, n});
  check.shape<2>("dup", *dup, {has_up ? m : 1, n});
  check.shape<2>("hidden", *hidden, {m, n});
  int const tile_n = tile.tile_n;
  if (tile_n <= 0) return invalid("tile_n must be positive, got " + std::to_string(tile_n));
  if (function < 0 || function > static_cast<int>(mlp::Function::kSquaredRelu)) {
    return invalid("no function has the number " + std::to_string(function));
  }
  check.shape<2>("dweights", *dweights, {n / tile_n + (n % tile_n != 0), m});
  check.matrices(a.type, {dy, down_weights, gate, up, *dgate, *dup, *hidden});
  if (check.failed()) return check.error();

  a.dy = dy.untyped_data();
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

ffi::Error paired_ragged_dot(cudaStream_t stream, ffi::AnyBuffer first_lhs,
                             ffi::AnyBuffer second_lhs, ffi::AnyBuffer first_rhs,
                             ffi::AnyBuffer second_rhs, Sizes group_sizes, Sizes group_offset,
                             Result out, WorkspaceResult, ffi::Dictionary attributes) {
  Attributes given(attributes);
  Check check;
  mlp::PairedArguments a{};
  auto const zeroes_unowned = given.get<bool>("zeroes_unowned");
  a.max_sms = given.max_sms();
  TileConfig const tile = given.tile();
  if (given.error().failure()) return given.error();
  auto const [m, k] = check.size<2>("the first lhs", first_lhs);
  auto const [local_groups, n, depth] = check.size<3>("the first rhs", first_rhs);
  check.shape<2>("the second lhs", second_lhs, {m, k});
  check.shape<3>("the first rhs", first_rhs, {local_groups, n, k});
  check.shape<3>("the second rhs", second_rhs, {local_groups, n, k});
  check.groups(a.groups, group_sizes, group_offset, local_groups, m, zeroes_unowned);
  check.shape<2>("out", *out, {m, n});
  check.matrices(a.type, {first_lhs, second_lhs, first_rhs, second_rhs, *out});
  if (check.failed()) return check.error();

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
  Attributes given(attributes);
  Check check;
  mlp::WeightGradientArguments a{};
  auto const has_rows = given.get<bool>("has_rows");
  auto const divisor = given.get<int32_t>("divisor");
  a.max_sms = given.max_sms();
  TileConfig const tile = given.tile();
  if (given.error().failure()) return given.error();
  auto const [tokens, k] = check.size<2>("x", x);
  auto const [m, n] = check.size<2>("the first rhs", first_rhs);
  auto const [local_groups, columns, depth] = check.size<3>("the first result", *first_out);
  check.shape<2>("x", x, {has_rows ? tokens : m, k});
  check.shape<1>("rows", rows, {has_rows ? m : 1});
  check.shape<2>("the second rhs", second_rhs, {m, n});
  check.shape<3>("the first result", *first_out, {local_groups, k, n});
  check.shape<3>("the second result", *second_out, {local_groups, k, n});
  check.groups(a.groups, group_sizes, group_offset, local_groups, m, /*zeroes_unowned=*/true);
  check.matrices(a.type, {x, first_rhs, second_rhs, *first_out, *second_out});
  if (check.failed()) return check.error();
  if (divisor < 1) return invalid("divisor has to be positive");

  a.x = x.untyped_data();
  a.rows = has_rows ? rows.typed_data() : nullptr;
  a.divisor = divisor;
  a.tokens = tokens;
  a.rhs[0] = first_rhs.untyped_data();
  a.rhs[1] = second_rhs.untyped_data();
  a.out[0] = first_out->untyped_data();
  a.out[1] = second_out->untyped_data();
  a.workspace = workspace->typed_data();
  a.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  a.k = k;
  a.n = n;
  return launched(mlp::weight_gradients(tile, a, stream), "paired_weight_gradients");
}

Handler<gated_gradient> const gradient_handler{"gated_ragged_dot_transpose.v4"};
Handler<paired_ragged_dot> const paired_handler{"paired_ragged_dot.v2"};
Handler<weight_gradients> const weight_gradients_handler{"paired_weight_gradients.v1"};

}  // namespace
}  // namespace jgg
