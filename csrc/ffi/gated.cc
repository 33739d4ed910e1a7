// Bindings of the forward kernels of an expert MLP: check the buffers, name the sizes, launch.
#include "ffi/gated_arguments.h"

namespace jgg {
namespace {

// A product of rows with matrices, and what is done to its sums.
ffi::Error launch(KernelKind kind, char const* name, cudaStream_t stream, ffi::AnyBuffer x,
                  ffi::AnyBuffer matrices, Sizes group_sizes, Sizes group_offset,
                  ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  auto const stack = Shape<3>::of("the matrices", matrices);
  if (!stack) return stack.error();
  if (stack->batched) return invalid("the kernels of an expert MLP have no batch dimension");
  auto const [local_groups, k, columns] = stack->size;
  Attributes asked(attributes);
  TileConfig const tile = asked.tile(kind);
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
  return launched(mlp::gated_ragged_dot(tile, a, stream), name);
}

template <class... Operands>
ffi::Error gated_ragged_dot(cudaStream_t stream, Operands... operands) {
  return launch(KernelKind::kCooperative, "gated_ragged_dot", stream, operands...);
}
template <class... Operands>
ffi::Error few_rows_dot(cudaStream_t stream, Operands... operands) {
  return launch(KernelKind::kSwapped, "few_rows_dot", stream, operands...);
}

// A layer of few tokens, with matrices of bf16.
ffi::Error decode_mlp(cudaStream_t stream, ffi::AnyBuffer x,
                      ffi::Buffer<ffi::DataType::S32> experts,
                      ffi::Buffer<ffi::DataType::F32> weights, Sizes group_offset,
                      ffi::AnyBuffer gate, ffi::AnyBuffer down, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, ffi::Dictionary attributes) {
  auto const stack = Shape<3>::of("wi_0", gate);
  if (!stack) return stack.error();
  auto const [local_groups, k, columns] = stack->size;
  Attributes asked(attributes);
  TileConfig const tile = asked.tile(KernelKind::kSwapped);
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  Decoding all{};
  auto error = take({x, experts, weights, group_offset, results}, asked, given, local_groups, all);
  if (error.failure()) return error;
  mlp::GatedArguments& a = all.hidden;
  a.is_concatenated = columns == 2 * int64_t(a.n);
  if (stack->batched || k != a.k || (!a.is_concatenated && columns != a.n)) {
    return invalid("the matrices do not fit x and hidden");
  }
  error = has_shape<3>("wo", down, {local_groups, a.n, a.k});
  if (error.failure()) return error;
  for (ffi::AnyBuffer const& buffer : {x, gate, down}) {
    if (buffer.element_type() != x.element_type()) return invalid("operands differ in type");
    error = whole_vectors("an operand", buffer);
    if (error.failure()) return error;
  }
  a.gate_weights = gate.untyped_data();
  a.up_weights = given.take("wi_1", std::array{local_groups, a.k, a.n}, {x.element_type()});
  all.down.gate_weights = down.untyped_data();
  if (given.error().failure()) return given.error();
  error = launched(mlp::gated_ragged_dot(tile, a, stream), "decode_mlp");
  if (error.failure()) return error;
  error = launched(mlp::gated_ragged_dot(tile, all.down, stream), "decode_mlp");
  if (error.failure()) return error;
  return launched(rows::combine_rows(all.sum, stream), "decode_mlp");
}

auto binding() {
  return on_stream()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // matrices: of the gate, or of gate and up
      .Arg<Sizes>()           // group_sizes
      .Arg<Sizes>()           // group_offset
      .RemainingArgs()        // as the attribute `optional` names them
      .RemainingRets()        // the result; gate and up, if they are kept
      .Attrs();
}

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(
    JggGatedRaggedDot, [](auto... operands) { return jgg::gated_ragged_dot(operands...); },
    jgg::binding());
JGG_DEFINE_HANDLER(JggDecodeMlp, jgg::decode_mlp,
                   jgg::on_stream()
                       .Arg<jgg::ffi::AnyBuffer>()                        // x
                       .Arg<jgg::ffi::Buffer<jgg::ffi::DataType::S32>>()  // experts
                       .Arg<jgg::ffi::Buffer<jgg::ffi::DataType::F32>>()  // weights
                       .Arg<jgg::Sizes>()                                 // group_offset
                       .Arg<jgg::ffi::AnyBuffer>()  // matrices: of the gate, or of gate and up
                       .Arg<jgg::ffi::AnyBuffer>()  // wo
                       .RemainingArgs()             // as the attribute `optional` names them
                       .RemainingRets()             // y; hidden and its products, one a pair
                       .Attrs());
JGG_DEFINE_HANDLER(
    JggFewRowsDot, [](auto... operands) { return jgg::few_rows_dot(operands...); }, jgg::binding());
