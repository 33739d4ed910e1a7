// Bindings of the forward kernels of an expert MLP: check the buffers, name the sizes, launch.
#include "ffi/gated_arguments.h"

namespace jgg {
namespace {

// A product of rows with matrices, and what is done to its sums. The matrices are those of the
// gate, or of gate and up next to each other. Operands are as the attribute `optional` names them;
// results are the product, and gate and up if they are kept.
template <KernelKind kKind>
ffi::Error launch(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer matrices, Sizes group_sizes,
                  Sizes group_offset, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  auto const stack = Shape<3>::of("the matrices", matrices);
  if (!stack) return stack.error();
  if (stack->batched) return invalid("the kernels of an expert MLP have no batch dimension");
  auto const [local_groups, k, columns] = stack->size;
  Attributes asked(attributes);
  TileConfig const tile = asked.tile(kKind);
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  mlp::GatedArguments a{};
  auto error = take({x, group_sizes, group_offset, results}, asked, given, local_groups, k, a);
  if (error.failure()) return error;
  auto const type = x.element_type();
  if (matrices.element_type() != type) return invalid("x and the matrices differ in type");
  auto out = results.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();
  for (ffi::AnyBuffer const& buffer : {x, matrices, ffi::AnyBuffer(**out)}) {
    error = whole_vectors("an operand or the result", buffer);
    if (error.failure()) return error;
  }
  a.is_concatenated = a.has_activation && columns == 2 * int64_t(a.n);
  if (!a.is_concatenated && columns != a.n) return invalid("the matrices do not fit the result");
  a.gate_weights = matrices.untyped_data();
  a.up_weights = given.take("wi_1", std::array{local_groups, k, a.n}, {type});
  if (given.error().failure()) return given.error();
  error = take_results(results, a.has_up(), a);
  if (error.failure()) return error;
  return launched(mlp::gated_ragged_dot(tile, a, stream),
                  kKind == KernelKind::kSwapped ? "few_rows_dot" : "gated_ragged_dot");
}

Handler<launch<KernelKind::kCooperative>> const gated_handler{"gated_ragged_dot.v3"};
Handler<launch<KernelKind::kSwapped>> const few_rows_handler{"few_rows_dot.v2"};

}  // namespace
}  // namespace jgg
