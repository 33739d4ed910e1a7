// Arguments that all bindings of products with an expert MLP's epilogue share.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <string_view>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "mlp/gated_ragged_dot.h"
#include "rows/rows.h"

namespace jgg {

// The value of the attribute `function` for a product without an activation.
constexpr int kNoFunction = -1;

// The optional operands of a call, by name.
class OptionalOperands {
 public:
  // The attribute `optional` lists the names of `operands`, separated by blanks.
  OptionalOperands(Call& call, ffi::RemainingArgs const& operands)
      : call_(call), operands_(operands), names_(call.get<std::string_view>("optional")) {}

  // Returns the address of an operand, or null if the call lacks it. Checks the shape and type.
  template <size_t kRank>
  void const* take(std::string_view name, std::array<int, kRank> expected,
                   std::initializer_list<ffi::DataType> types) {
    int const place = place_of(name);
    if (place < 0 || call_.failed()) return nullptr;
    auto const buffer = operands_.get<ffi::AnyBuffer>(place);
    if (!buffer) return call_.fail(buffer.error().message()), nullptr;
    std::string const named(name);
    if (call_.size<static_cast<int>(kRank)>(named.c_str(), *buffer) != expected) {
      call_.fail(named + " does not fit the other operands");
    }
    if (std::find(types.begin(), types.end(), buffer->element_type()) == types.end()) {
      call_.fail(named + " has an element type that the kernel does not take");
    }
    return call_.failed() ? nullptr : buffer->untyped_data();
  }

  // Returns the element type of an operand that is present.
  ffi::DataType type_of(std::string_view name) const { return buffer(name).element_type(); }
  bool has(std::string_view name) const { return place_of(name) >= 0; }
  // Returns an operand that is present. The caller checks its shape and type.
  ffi::AnyBuffer buffer(std::string_view name) const {
    return *operands_.get<ffi::AnyBuffer>(place_of(name));
  }

 private:
  int place_of(std::string_view name) const {
    std::string_view rest = names_;
    for (int place = 0; !rest.empty(); ++place) {
      size_t const length = rest.find(' ');
      if (rest.substr(0, length) == name) return place;
      rest.remove_prefix(length == rest.npos ? rest.size() : length + 1);
    }
    return -1;
  }

  Call& call_;
  ffi::RemainingArgs const& operands_;
  std::string_view names_;
};

// The results of a call, and its operands except matrices and optional operands.
struct GatedCall {
  ffi::AnyBuffer x;
  Sizes group_sizes;
  Sizes group_offset;
  ffi::RemainingRets results;
};

// Fills in `a` for `local_groups` matrices [k, n], except the matrices and the results. Also takes
// the optional operands that are not matrices.
inline void take(GatedCall const& given, Call& call, OptionalOperands& optional, int local_groups,
                 int k, mlp::GatedArguments& a) {
  auto const zeroes_unowned = call.get<bool>("zeroes_unowned");
  auto const function = call.get<int32_t>("function");
  a.activation = call.activation(static_cast<mlp::Function>(function));
  a.has_activation = function != kNoFunction;
  a.max_sms = call.max_sms();
  a.divisor = call.divisor();
  if (given.results.size() < 1 || given.results.size() > 3) {
    call.fail("a call has one to three results");
  }
  if (call.failed()) return;
  auto const out = **given.results.get<ffi::AnyBuffer>(0);
  auto const [m, n] = call.size<2>("the result", out);
  auto const [tokens, depth] = call.size<2>("x", given.x);
  auto const type = given.x.element_type();
  if (depth != k) call.fail("x does not fit the matrices");
  if (!element_type(type, {ElementType::kBf16}, a.type) || out.element_type() != type) {
    call.fail("the kernels of an expert MLP take operands and results of bf16");
  }
  a.groups =
      groups_of(call, given.group_sizes, given.group_offset, 1, local_groups, m, zeroes_unowned);
  a.tokens = tokens;
  a.k = k;
  a.n = n;
  a.x = given.x.untyped_data();

  constexpr auto kFloat = ffi::DataType::F32;
  auto const bias = [&](char const* name) {
    void const* const data = optional.take(name, std::array{local_groups, a.n}, {type, kFloat});
    return mlp::Bias{data, data && optional.type_of(name) == kFloat};
  };
  a.rows = static_cast<int const*>(optional.take("rows", std::array{m}, {ffi::DataType::S32}));
  a.gate_bias = bias(optional.has("bo") ? "bo" : "b0");
  a.up_bias = bias("b1");
  a.weights = static_cast<float const*>(optional.take("weights", std::array{m}, {kFloat}));
  if (optional.has("weights_of_pairs")) {
    std::array const pairs{a.tokens, a.divisor};
    a.weights = static_cast<float const*>(optional.take("weights_of_pairs", pairs, {kFloat}));
    a.weights_of_pairs = true;
  }
  if (a.weights_of_pairs && !a.rows) call.fail("weights_of_pairs needs rows");
  if (!a.rows && a.tokens != m) call.fail("x does not fit the result");
}

// Takes the results of a call whose matrices are known: hidden and, if they are kept, gate and up.
inline void take_results(Call& call, ffi::RemainingRets const& results, bool has_up,
                         mlp::GatedArguments& a) {
  if (call.failed()) return;
  if (results.size() > 1 && results.size() != (has_up ? 3 : 2)) {
    call.fail("gate and up have to be kept together");
  }
  auto const out = **results.get<ffi::AnyBuffer>(0);
  a.hidden = out.untyped_data();
  for (size_t i = 1; i < results.size(); ++i) {
    auto const kept = **results.get<ffi::AnyBuffer>(i);
    if (kept.element_count() != out.element_count() || kept.element_type() != out.element_type()) {
      call.fail("results differ in size or in type");
    }
    (i == 1 ? a.gate : a.up) = kept.untyped_data();
  }
}

// The operands of a layer of few tokens, except matrices and optional operands, and its results: y
// [tokens, D], and buffers for hidden [pairs, F] and for the products of hidden [pairs, D].
struct DecodingCall {
  ffi::AnyBuffer x;
  ffi::Buffer<ffi::S32> experts;  // [tokens, choices]
  Floats weights;                 // [tokens, choices]
  Sizes group_offset;
  ffi::RemainingRets results;
};

// The launches of a layer of few tokens, in order.
struct Decoding {
  mlp::GatedArguments hidden;
  mlp::GatedArguments down;
  rows::CombineArguments sum;
};

// Returns the launches, with everything filled in except the matrices.
inline Decoding take(DecodingCall const& given, Call& call, OptionalOperands& optional,
                     int local_groups) {
  Decoding all{};
  auto const type = given.x.element_type();
  auto const [tokens, d] = call.size<2>("x", given.x);
  auto const [rows, choices] = call.size<2>("experts", given.experts);
  if (rows != tokens || tokens * int64_t(choices) > mlp::Pairs::kMost) {
    call.fail("experts does not have a row for each token, or has too many elements");
  }
  if (given.results.size() != 3) call.fail("a call has three results");
  if (call.failed()) return all;
  call.expect<2>("weights", given.weights, {tokens, choices});
  call.expect<1>("group_offset", given.group_offset, {1});
  auto const result = [&](int i) { return **given.results.get<ffi::AnyBuffer>(i); };
  int const m = tokens * choices, f = call.size<2>("hidden", result(1))[1];
  call.expect<2>("y", result(0), {tokens, d});
  call.expect<2>("hidden", result(1), {m, f});
  call.expect<2>("the products of hidden", result(2), {m, d});
  for (int i = 0; i < 3; ++i) {
    if (result(i).element_type() != type) call.fail("x and the results differ in type");
  }
  mlp::GatedArguments& a = all.hidden;
  a.type = call.type(given.x, {ElementType::kBf16}, "the kernels of an expert MLP take bf16");
  a.activation = call.activation(static_cast<mlp::Function>(call.get<int32_t>("function")));
  a.max_sms = call.max_sms();
  a.has_activation = true;
  a.x = given.x.untyped_data();
  a.tokens = tokens;
  a.divisor = choices;
  a.k = d;
  a.n = f;
  a.weights = given.weights.typed_data();
  a.weights_of_pairs = true;
  a.hidden = result(1).untyped_data();
  a.groups.offset = given.group_offset.typed_data();
  a.groups.batches = 1;
  a.groups.groups = call.get<int32_t>("groups");
  a.groups.local_groups = local_groups;
  a.groups.rows = m;
  a.groups.zeroes_unowned = false;
  a.pairs.groups = given.experts.typed_data();
  if (a.groups.groups < 1 || a.groups.groups > mlp::Pairs::kMostGroups) {
    call.fail("kernels that sort pairs take from 1 to " + std::to_string(mlp::Pairs::kMostGroups) +
              " groups");
  }
  constexpr auto kFloat = ffi::DataType::F32;
  auto const bias = [&](char const* name, int n) {
    void const* const data = optional.take(name, std::array{local_groups, n}, {type, kFloat});
    return mlp::Bias{data, data && optional.type_of(name) == kFloat};
  };

  mlp::GatedArguments& b = all.down = a;
  b.has_activation = false;
  b.x = a.hidden;
  b.tokens = m;
  b.k = f;
  b.n = d;
  b.hidden = result(2).untyped_data();
  b.groups.zeroes_unowned = true;
  b.pairs.are_returned = b.pairs.follow = true;
  a.gate_bias = bias("b0", f);
  a.up_bias = bias("b1", f);
  b.gate_bias = bias("bo", d);

  all.sum.shape = {a.type, d, 1};
  all.sum.rows.rows = m;
  all.sum.pairs.tokens = tokens;
  all.sum.pairs.choices = choices;
  all.sum.y.data = b.hidden;
  all.sum.x = result(0).untyped_data();
  all.sum.follows = true;
  return all;
}

}  // namespace jgg
