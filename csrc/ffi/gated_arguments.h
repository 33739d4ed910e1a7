// Arguments that all bindings of products with an expert MLP's epilogue share.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "mlp/gated_ragged_dot.h"
#include "rows/rows.h"

namespace jgg {

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

  // The element type of an operand that is present.
  ffi::DataType type_of(std::string_view name) const {
    return operands_.get<ffi::AnyBuffer>(place_of(name))->element_type();
  }
  bool has(std::string_view name) const { return place_of(name) >= 0; }
  // The operand, if it is there, to be checked by the caller.
  std::optional<ffi::AnyBuffer> buffer(std::string_view name) const {
    if (!has(name)) return std::nullopt;
    auto const found = operands_.get<ffi::AnyBuffer>(place_of(name));
    return found ? std::optional(*found) : std::nullopt;
  }

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

// The operands of a call besides the matrices and those that need not be there, and its results.
struct GatedCall {
  ffi::AnyBuffer x;
  Sizes group_sizes;
  Sizes group_offset;
  ffi::RemainingRets results;
};

// Fills in `a`, with local_groups matrices [k, n] for a result of n columns. Takes the operands
// that need not be there and are no matrices.
inline ffi::Error take(GatedCall call, Attributes& asked, OptionalOperands& given, int local_groups,
                       int k, mlp::GatedArguments& a) {
  auto const zeroes_unowned = asked.get<bool>("zeroes_unowned");
  auto const function = asked.get<int32_t>("function"), divisor = asked.get<int32_t>("divisor");
  a.activation = asked.activation(static_cast<mlp::Function>(function));
  a.max_sms = asked.max_sms();
  if (asked.error().failure()) return asked.error();
  auto const tokens = Shape<2>::of("x", call.x);
  if (!tokens) return tokens.error();
  auto out = call.results.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();
  auto const rows = Shape<2>::of("the result", **out);
  if (!rows) return rows.error();
  if (tokens->batched || rows->batched) {
    return invalid("the kernels of an expert MLP have no batch dimension");
  }
  int const m = rows->size[0], n = rows->size[1];
  auto const type = call.x.element_type();
  if (tokens->size[1] != k) return invalid("x does not fit the matrices");
  if (divisor < 1) return invalid("divisor has to be positive");
  if (!element_type(type, {ElementType::kBf16}, a.type) || (*out)->element_type() != type) {
    return invalid("the kernels of an expert MLP take operands and results of bf16");
  }
  auto const groups =
      groups_of(call.group_sizes, call.group_offset, 1, local_groups, m, zeroes_unowned);
  if (!groups) return groups.error();
  a.groups = *groups;
  a.has_activation = function != kNoFunction;
  a.tokens = tokens->size[0];
  a.divisor = divisor;
  a.k = k;
  a.n = n;
  a.x = call.x.untyped_data();

  constexpr auto kFloat = ffi::DataType::F32;
  auto const bias = [&](char const* name) {
    void const* const data = given.take(name, std::array{local_groups, n}, {type, kFloat});
    return mlp::Bias{data, data && given.type_of(name) == kFloat};
  };
  a.rows = static_cast<int const*>(given.take("rows", std::array{m}, {ffi::DataType::S32}));
  a.gate_bias = bias(given.has("bo") ? "bo" : "b0");
  a.up_bias = bias("b1");
  a.weights = static_cast<float const*>(given.take("weights", std::array{m}, {kFloat}));
  if (given.has("weights_of_pairs")) {
    std::array const pairs{a.tokens, divisor};
    a.weights = static_cast<float const*>(given.take("weights_of_pairs", pairs, {kFloat}));
    a.weights_of_pairs = true;
  }
  if (given.error().failure()) return given.error();
  if (a.weights_of_pairs && !a.rows) return invalid("weights of pairs need to know the pairs");
  if (!a.rows && a.tokens != m) return invalid("x does not fit the result");
  return ffi::Error::Success();
}

// The operands of a layer of few tokens besides matrices and those that need not be there.
struct DecodingCall {
  ffi::AnyBuffer x;                         // [tokens, D]
  ffi::Buffer<ffi::DataType::S32> experts;  // [tokens, choices]
  ffi::Buffer<ffi::DataType::F32> weights;  // [tokens, choices]
  Sizes group_offset;                       // [1]
  ffi::RemainingRets results;  // y [tokens, D], hidden [pairs, F], its products [pairs, D]
};

// The three launches of such a layer, of which the last two follow the one before.
struct Decoding {
  mlp::GatedArguments hidden;
  mlp::GatedArguments down;
  rows::CombineArguments sum;
};

// Fills in all but the matrices. The results are the first ones of the call.
inline ffi::Error take(DecodingCall call, Attributes& asked, OptionalOperands& given,
                       int local_groups, Decoding& all) {
  auto const function = asked.get<int32_t>("function"), groups = asked.get<int32_t>("groups");
  auto const tokens = Shape<2>::of("x", call.x);
  if (!tokens) return tokens.error();
  auto const pairs = Shape<2>::of("experts", call.experts);
  if (!pairs) return pairs.error();
  std::array<std::array<int, 2>, 3> sizes{};
  std::array<void*, 3> results{};
  if (call.results.size() != results.size()) return invalid("there are three results");
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = call.results.get<ffi::AnyBuffer>(i);
    if (!result) return result.error();
    auto const shape = Shape<2>::of("a result", **result);
    if (!shape) return shape.error();
    if (shape->batched || (*result)->element_type() != call.x.element_type()) {
      return invalid("results have two dimensions and the type of x");
    }
    sizes[i] = shape->size;
    results[i] = (*result)->untyped_data();
  }
  auto const [count, d] = tokens->size;
  int const choices = pairs->size[1], m = count * choices, f = sizes[1][1];
  if (tokens->batched || pairs->batched || pairs->size[0] != count) {
    return invalid("experts have to be [tokens, choices]");
  }
  if (m < 1 || m > mlp::Pairs::kMost || groups < 1 || groups > mlp::Pairs::kMostGroups) {
    return invalid("too many pairs of tokens and experts, or too many experts");
  }
  auto error = has_shape<2>("weights", call.weights, {count, choices});
  if (error.failure()) return error;
  error = has_shape<1>("group_offset", call.group_offset, {1});
  if (error.failure()) return error;
  std::array<std::array<int, 2>, 3> const expected{{{count, d}, {m, f}, {m, d}}};
  if (sizes != expected) return invalid("results do not fit the operands");
  mlp::GatedArguments& a = all.hidden;
  if (!element_type(call.x.element_type(), {ElementType::kBf16}, a.type)) {
    return invalid("the kernels of an expert MLP take operands and results of bf16");
  }
  a.activation = asked.activation(static_cast<mlp::Function>(function));
  a.max_sms = asked.max_sms();
  if (asked.error().failure()) return asked.error();
  a.has_activation = true;
  a.x = call.x.untyped_data();
  a.tokens = count;
  a.divisor = choices;
  a.k = d;
  a.n = f;
  a.weights = call.weights.typed_data();
  a.weights_of_pairs = true;
  a.hidden = results[1];
  a.groups.offset = call.group_offset.typed_data();
  a.groups.batches = 1;
  a.groups.groups = groups;
  a.groups.local_groups = local_groups;
  a.groups.rows = m;
  a.groups.zeroes_unowned = false;
  a.pairs.groups = call.experts.typed_data();

  mlp::GatedArguments& b = all.down = a;
  b.has_activation = false;
  b.x = a.hidden;
  b.tokens = m;
  b.k = f;
  b.n = d;
  b.hidden = results[2];
  b.groups.zeroes_unowned = true;
  b.pairs.are_returned = b.pairs.follow = true;

  constexpr auto kFloat = ffi::DataType::F32;
  auto const bias = [&](char const* name, int n) {
    void const* const data =
        given.take(name, std::array{local_groups, n}, {call.x.element_type(), kFloat});
    return mlp::Bias{data, data && given.type_of(name) == kFloat};
  };
  a.gate_bias = bias("b0", f);
  a.up_bias = bias("b1", f);
  b.gate_bias = bias("bo", d);

  all.sum.shape = {rows::ElementType::kBf16, d, 1};
  all.sum.rows = {{}, m};
  all.sum.pairs = {{}, {}, count, choices};
  all.sum.y = {results[2]};
  all.sum.x = results[0];
  all.sum.follows = true;
  return given.error();
}

// The results of a call whose matrices are known: the hidden rows, and gate and up if both are
// kept.
inline ffi::Error take_results(ffi::RemainingRets results, bool has_up, mlp::GatedArguments& a) {
  if (results.size() < 1 || results.size() > 3) return invalid("there are one to three results");
  auto out = results.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();
  if (results.size() > 1 && results.size() != (has_up ? 3 : 2)) {
    return invalid("gate and up are both kept, or neither is");
  }
  a.hidden = (*out)->untyped_data();
  for (size_t i = 1; i < results.size(); ++i) {
    auto kept = results.get<ffi::AnyBuffer>(i);
    if (!kept) return kept.error();
    if ((*kept)->element_count() != (*out)->element_count() ||
        (*kept)->element_type() != (*out)->element_type()) {
      return invalid("results differ in size or in type");
    }
    (i == 1 ? a.gate : a.up) = (*kept)->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace jgg
