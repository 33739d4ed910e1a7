// Bindings of the forward kernels of an expert MLP: check the buffers, read the sizes, launch.
#include "ffi/gated_arguments.h"

namespace jgg {
namespace {

// Multiplies rows by matrices and applies the epilogue to the sums. `matrices` are those of the
// gate, or of gate and up next to each other. The attribute `optional` has the names of `operands`
// in order. The results are the product and, if they are kept for a backward pass, gate and up.
template <KernelKind kKind>
ffi::Error gated(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer matrices, Sizes group_sizes,
                 Sizes group_offset, ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile(kKind);
  OptionalOperands optional(call, operands);
  auto const [local_groups, k, columns] = call.size<3>("the stack of matrices", matrices);
  mlp::GatedArguments a{};
  take({x, group_sizes, group_offset, results}, call, optional, local_groups, k, a);
  if (call.failed()) return call.error();
  auto const type = x.element_type();
  if (matrices.element_type() != type) call.fail("x and the matrices differ in type");
  for (ffi::AnyBuffer const& buffer : {x, matrices, **results.get<ffi::AnyBuffer>(0)}) {
    call.expect_vectors("an operand or the result", buffer);
  }
  a.is_concatenated = a.has_activation && columns == 2 * int64_t(a.n);
  if (!a.is_concatenated && columns != a.n) call.fail("the matrices do not fit the result");
  a.gate_weights = matrices.untyped_data();
  a.up_weights = optional.take("wi_1", std::array{local_groups, k, a.n}, {type});
  take_results(call, results, a.has_up(), a);
  if (call.failed()) return call.error();
  return launched(mlp::gated_ragged_dot(tile, a, stream),
                  kKind == KernelKind::kSwapped ? "few_rows_dot" : "gated_ragged_dot");
}

// Computes a layer of few tokens. `gate` has the matrices of the gate, or of gate and up.
ffi::Error decode_mlp(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> experts,
                      Floats weights, Sizes group_offset, ffi::AnyBuffer gate, ffi::AnyBuffer down,
                      ffi::RemainingArgs operands, ffi::RemainingRets results,
                      ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile(KernelKind::kSwapped);
  OptionalOperands optional(call, operands);
  auto const [local_groups, k, columns] = call.size<3>("wi_0", gate);
  Decoding all = take({x, experts, weights, group_offset, results}, call, optional, local_groups);
  if (call.failed()) return call.error();
  mlp::GatedArguments& a = all.hidden;
  a.is_concatenated = columns == 2 * int64_t(a.n);
  if (k != a.k || (!a.is_concatenated && columns != a.n)) {
    call.fail("wi_0 does not fit x and hidden");
  }
  call.expect<3>("wo", down, {local_groups, a.n, a.k});
  for (ffi::AnyBuffer const& buffer : {x, gate, down}) {
    if (buffer.element_type() != x.element_type()) call.fail("x and the matrices differ in type");
    call.expect_vectors("an operand", buffer);
  }
  call.expect_vectors("hidden", **results.get<ffi::AnyBuffer>(1));
  a.gate_weights = gate.untyped_data();
  a.up_weights = optional.take("wi_1", std::array{local_groups, a.k, a.n}, {x.element_type()});
  all.down.gate_weights = down.untyped_data();
  if (call.failed()) return call.error();
  for (mlp::GatedArguments* product : {&a, &all.down}) {
    auto const error = launched(mlp::gated_ragged_dot(tile, *product, stream), "decode_mlp");
    if (error.failure()) return error;
  }
  return launched(rows::combine_rows(all.sum, stream), "decode_mlp");
}

Handler<gated<KernelKind::kCooperative>> const gated_handler{"gated_ragged_dot.v3"};
Handler<decode_mlp> const decode_handler{"decode_mlp.v1"};
Handler<gated<KernelKind::kSwapped>> const few_rows_handler{"few_rows_dot.v2"};

}  // namespace
}  // namespace jgg
