// Binding of the products for groups of few rows: check the buffers, name the sizes, launch.
#include "few_rows/few_rows.h"

#include <array>
#include <string>
#include <string_view>

#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/handlers.h"

namespace jgg {
namespace {

using few_rows::Arguments;

// No activation: the value of the attribute `function` for a product and its bias alone.
constexpr int kNoFunction = -1;

// The operands that need not be there, by name, and what is wrong with the first that does not fit.
class OptionalOperands {
 public:
  // `names` are those of `operands`, with blanks between them.
  OptionalOperands(ffi::RemainingArgs const& operands, std::string_view names)
      : operands_(operands), names_(names) {}

  // The address of an operand of the expected shape, null if it is not there.
  template <size_t kRank>
  void const* take(std::string_view name, std::array<int, kRank> expected,
                   std::initializer_list<ffi::DataType> types) {
    int const place = place_of(name);
    if (place < 0 || error_.failure()) return nullptr;
    auto const buffer = operands_.get<ffi::AnyBuffer>(place);
    if (!buffer) return fail(buffer.error());
    auto const shape = Shape<static_cast<int>(kRank)>::of(std::string(name).c_str(), *buffer);
    if (!shape) return fail(shape.error());
    if (shape->batched || shape->size != expected) {
      return fail(invalid(std::string(name) + " does not fit the other operands"));
    }
    for (auto const type : types) {
      if (buffer->element_type() == type) return buffer->untyped_data();
    }
    return fail(invalid(std::string(name) + " has an element type that the kernel does not take"));
  }

  // Of an operand that is there.
  ffi::DataType type_of(std::string_view name) const {
    return operands_.get<ffi::AnyBuffer>(place_of(name))->element_type();
  }
  bool has(std::string_view name) const { return place_of(name) >= 0; }

  ffi::Error const& error() const { return error_; }

 private:
  void const* fail(ffi::Error error) {
    error_ = std::move(error);
    return nullptr;
  }

  int place_of(std::string_view name) const {
    std::string_view rest = names_;
    for (int place = 0; !rest.empty(); ++place) {
      size_t const length = rest.find(' ');
      if (rest.substr(0, length) == name) return place;
      rest.remove_prefix(length == rest.npos ? rest.size() : length + 1);
    }
    return -1;
  }

  ffi::RemainingArgs const& operands_;
  std::string_view names_;
  ffi::Error error_ = ffi::Error::Success();
};

ffi::Error few_rows_dot(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer matrices,
                        Sizes group_sizes, Sizes group_offset, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, std::string_view optional, int32_t function,
                        int32_t divisor, float alpha, float cubic, float limit, float shift,
                        int32_t tile_m, int32_t tile_n, int32_t cluster) {
  Arguments a{};
  auto const tokens = Shape<2>::of("x", x);
  if (!tokens) return tokens.error();
  auto const stack = Shape<3>::of("the matrices", matrices);
  if (!stack) return stack.error();
  if (results.size() < 1 || results.size() > 3) return invalid("there are one to three results");
  auto out = results.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();
  auto const rows = Shape<2>::of("the result", **out);
  if (!rows) return rows.error();
  if (tokens->batched || stack->batched || rows->batched) {
    return invalid("the kernel for groups of few rows has no batch dimension");
  }
  auto const [local_groups, k, columns] = stack->size;
  int const m = rows->size[0], n = rows->size[1];
  if (tokens->size[1] != k) return invalid("x does not fit the matrices");
  if (divisor < 1) return invalid("divisor has to be positive");
  bool const is_known =
      element_type(x.element_type(), {ElementType::kBf16, ElementType::kF16}, a.type);
  if (!is_known || matrices.element_type() != x.element_type()) {
    return invalid("the kernel for groups of few rows takes operands of bf16 or of f16");
  }

  auto const groups = groups_of(group_sizes, group_offset, 1, local_groups, m);
  if (!groups) return groups.error();
  a.groups = *groups;
  a.has_activation = function != kNoFunction;
  a.is_concatenated = a.has_activation && columns == 2 * n;
  if (!a.is_concatenated && columns != n) return invalid("the matrices do not fit the result");
  a.activation = {alpha, cubic, limit, shift, static_cast<mlp::Function>(function)};
  a.tokens = tokens->size[0];
  a.divisor = divisor;
  a.k = k;
  a.n = n;
  a.x = x.untyped_data();
  a.gate = matrices.untyped_data();

  OptionalOperands given(operands, optional);
  auto const type = x.element_type();
  constexpr auto kFloat = ffi::DataType::F32;
  a.up = given.take("wi_1", std::array{local_groups, k, n}, {type});
  a.rows = static_cast<int const*>(given.take("rows", std::array{m}, {ffi::DataType::S32}));
  char const* const first = given.has("bo") ? "bo" : "b0";
  a.gate_bias = given.take(first, std::array{local_groups, n}, {type, kFloat});
  a.up_bias = given.take("b1", std::array{local_groups, n}, {type, kFloat});
  a.weights = static_cast<float const*>(given.take("weights", std::array{m}, {kFloat}));
  if (given.has("weights_of_pairs")) {
    std::array const pairs{a.tokens, divisor};
    a.weights = static_cast<float const*>(given.take("weights_of_pairs", pairs, {kFloat}));
    a.weights_of_pairs = true;
  }
  if (given.error().failure()) return given.error();
  if (a.weights_of_pairs && !a.rows) return invalid("weights of pairs need to know the pairs");
  a.gate_bias_is_float32 = a.gate_bias && given.type_of(first) == kFloat;
  a.up_bias_is_float32 = a.up_bias && given.type_of("b1") == kFloat;

  if (!a.rows && a.tokens != m) return invalid("x does not fit the result");
  a.out = (*out)->untyped_data();
  for (size_t i = 1; i < results.size(); ++i) {
    auto kept = results.get<ffi::AnyBuffer>(i);
    if (!kept) return kept.error();
    if ((*kept)->element_count() != (*out)->element_count()) {
      return invalid("results differ in size");
    }
    (i == 1 ? a.kept_gate : a.kept_up) = (*kept)->untyped_data();
  }
  TileConfig const tile{tile_m, tile_n, cluster, KernelKind::kSwapped};
  return launched(few_rows::few_rows_dot(tile, a, stream), "few_rows_dot");
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(JggFewRowsDot, jgg::few_rows_dot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // matrices, those of the gate first
                                  .Arg<jgg::Sizes>()           // group_sizes
                                  .Arg<jgg::Sizes>()           // group_offset
                                  .RemainingArgs()             // as `optional` names them
                                  .RemainingRets()  // the result; gate and up, if they are kept
                                  .Attr<std::string_view>("optional")
                                  .Attr<int32_t>("function")
                                  .Attr<int32_t>("divisor")
                                  .Attr<float>("alpha")
                                  .Attr<float>("cubic")
                                  .Attr<float>("limit")
                                  .Attr<float>("shift")
                                  .Attr<int32_t>("tile_m")
                                  .Attr<int32_t>("tile_n")
                                  .Attr<int32_t>("cluster"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
