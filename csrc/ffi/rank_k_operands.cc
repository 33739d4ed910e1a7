#include "ffi/rank_k_operands.h"

#include <array>
#include <string>

namespace jgg {
namespace {

// Returns the scales of a stack of `matrices`. The buffer has to have elements of `type`.
RankKScales scales(Call& call, ffi::AnyBuffer const& buffer, ffi::DataType type, int matrices) {
  size_t const count = buffer.element_count();
  if (buffer.element_type() != type || (count != 1 && count != static_cast<size_t>(matrices))) {
    call.fail("scales need the kernels' type, and one element or one for each matrix");
  }
  return {buffer.untyped_data(), count == 1 ? 0 : 1};
}

}  // namespace

std::vector<RankKBuffers> rank_k_buffers(Call& call, ffi::RemainingArgs const& operands,
                                         ffi::RemainingRets const& results, RankKForm form,
                                         std::optional<ffi::DataType> scale_type) {
  size_t const count = results.size(), first_diagonal = form.has_c ? 2 * count : count;
  size_t const first = first_diagonal + (form.has_diagonal ? count : 0);
  size_t const first_c = first + (form.two_operands ? 2 * count : count);
  if (count == 0 || operands.size() != first_c + (form.has_c ? count : 0)) {
    call.fail("every operand has as many stacks as there are results");
  }
  std::vector<RankKBuffers> stacks;
  for (size_t i = 0; i < count && !call.failed(); ++i) {
    auto const operand = [&](size_t index) { return *operands.get<ffi::AnyBuffer>(index); };
    auto const of_result = " of result " + std::to_string(i);
    ffi::AnyBuffer const a = operand(first + i), out = **results.get<ffi::AnyBuffer>(i);
    auto const shape = call.size<3>("an operand", a), of_out = call.size<3>("a result", out);

    RankKBuffers stack{};
    stack.a = a.untyped_data();
    stack.out = out.untyped_data();
    stack.type = a.element_type();
    stack.out_type = out.element_type();
    stack.matrices = shape[0];
    stack.n = shape[form.transpose ? 2 : 1];
    stack.k = shape[form.transpose ? 1 : 2];
    if ((i > 0 && (stack.type != stacks[0].type || stack.out_type != stacks[0].out_type)) ||
        of_out != std::array{stack.matrices, stack.n, stack.n}) {
      call.fail("result " + std::to_string(i) + " does not fit its operand");
    }
    ffi::DataType const type = scale_type.value_or(stack.type);
    stack.alpha = scales(call, operand(i), type, stack.matrices);
    stack.beta = scales(call, operand(form.has_c ? count + i : i), type, stack.matrices);
    stack.diagonal =
        scales(call, operand(form.has_diagonal ? first_diagonal + i : i), type, stack.matrices);
    stack.c = stack.out;
    if (form.two_operands) {
      ffi::AnyBuffer const b = operand(first + count + i);
      if (b.element_type() != stack.type || call.size<3>("an operand", b) != shape) {
        call.fail("a and b" + of_result + " differ");
      }
      stack.b = b.untyped_data();
    }
    if (form.has_c) {
      ffi::AnyBuffer const c = operand(first_c + i);
      if (form.updates_c && c.untyped_data() != stack.out) {
        call.fail("c" + of_result + " is not aliased to it");
      }
      if (c.element_type() != stack.out_type || call.size<3>("an operand", c) != of_out) {
        call.fail("c" + of_result + " differs from it in shape or type");
      }
      stack.c = c.untyped_data();
    }
    stacks.push_back(stack);
  }
  if (call.failed()) stacks.clear();
  return stacks;
}

}  // namespace jgg
