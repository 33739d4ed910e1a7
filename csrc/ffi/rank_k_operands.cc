#include "ffi/rank_k_operands.h"

#include <string>

#include "ffi/stacks.h"

namespace jgg {
namespace {

// Operand number `index`, which has to be of `type`, for a stack of `matrices`.
ffi::ErrorOr<RankKScales> scales(ffi::RemainingArgs const& operands, size_t index,
                                 ffi::DataType type, int matrices) {
  auto const buffer = operands.get<ffi::AnyBuffer>(index);
  if (!buffer) return ffi::Unexpected(buffer.error());
  size_t const count = buffer->element_count();
  if (buffer->element_type() != type || (count != 1 && count != static_cast<size_t>(matrices))) {
    return ffi::Unexpected(
        invalid("scales have an element for each matrix, or one, of the kernels' type"));
  }
  return RankKScales{buffer->untyped_data(), count == 1 ? 0 : 1};
}

}  // namespace

ffi::ErrorOr<std::vector<RankKBuffers>> rank_k_buffers(ffi::RemainingArgs const& operands,
                                                       ffi::RemainingRets const& results,
                                                       RankKForm form,
                                                       std::optional<ffi::DataType> scale_type) {
  auto const unexpected = [](std::string const& message) {
    return ffi::Unexpected(invalid(message));
  };
  size_t const count = results.size(), first_diagonal = form.has_c ? 2 * count : count;
  size_t const first = first_diagonal + (form.has_diagonal ? count : 0);
  size_t const first_c = first + (form.two_operands ? 2 * count : count);
  if (count == 0 || operands.size() != first_c + (form.has_c ? count : 0)) {
    return unexpected("every operand has as many stacks as there are results");
  }
  std::vector<RankKBuffers> stacks;
  for (size_t i = 0; i < count; ++i) {
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!out) return ffi::Unexpected(out.error());
    auto const out_shape = StackShape::of(**out);
    if (!out_shape) return ffi::Unexpected(out_shape.error());
    auto const a = operands.get<ffi::AnyBuffer>(first + i);
    if (!a) return ffi::Unexpected(a.error());
    auto const shape = StackShape::of(*a);
    if (!shape) return ffi::Unexpected(shape.error());

    RankKBuffers stack{};
    stack.a = a->untyped_data();
    stack.out = (*out)->untyped_data();
    stack.type = a->element_type();
    stack.out_type = (*out)->element_type();
    stack.matrices = shape->count;
    stack.n = form.transpose ? shape->columns : shape->rows;
    stack.k = form.transpose ? shape->rows : shape->columns;
    if ((i > 0 && (stack.type != stacks[0].type || stack.out_type != stacks[0].out_type)) ||
        !(*out_shape == StackShape{stack.matrices, stack.n, stack.n})) {
      return unexpected("result " + std::to_string(i) + " does not fit its operand");
    }
    ffi::DataType const type = scale_type.value_or(stack.type);
    auto const alpha = scales(operands, i, type, stack.matrices);
    if (!alpha) return ffi::Unexpected(alpha.error());
    auto const beta = scales(operands, form.has_c ? count + i : i, type, stack.matrices);
    if (!beta) return ffi::Unexpected(beta.error());
    auto const diagonal =
        scales(operands, form.has_diagonal ? first_diagonal + i : i, type, stack.matrices);
    if (!diagonal) return ffi::Unexpected(diagonal.error());
    stack.alpha = *alpha;
    stack.beta = *beta;
    stack.diagonal = *diagonal;
    stack.c = stack.out;
    if (form.two_operands) {
      auto const b = operands.get<ffi::AnyBuffer>(first + count + i);
      if (!b) return ffi::Unexpected(b.error());
      auto const b_shape = StackShape::of(*b);
      if (!b_shape) return ffi::Unexpected(b_shape.error());
      if (b->element_type() != stack.type || !(*b_shape == *shape)) {
        return unexpected("a and b of result " + std::to_string(i) + " differ");
      }
      stack.b = b->untyped_data();
    }
    if (form.has_c) {
      auto const c = operands.get<ffi::AnyBuffer>(first_c + i);
      if (!c) return ffi::Unexpected(c.error());
      if (form.updates_c && c->untyped_data() != stack.out) {
        return unexpected("c of result " + std::to_string(i) + " is not aliased to it");
      }
      auto const c_shape = StackShape::of(*c);
      if (!c_shape) return ffi::Unexpected(c_shape.error());
      if (c->element_type() != stack.out_type || !(*c_shape == *out_shape)) {
        return unexpected("c of result " + std::to_string(i) + " differs from it");
      }
      stack.c = c->untyped_data();
    }
    stacks.push_back(stack);
  }
  return stacks;
}

}  // namespace jgg
