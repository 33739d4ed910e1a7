// Bindings of the forward kernels of an expert MLP: check the buffers, name the sizes, launch.
#include "ffi/gated_arguments.h"

namespace jgg {
namespace {

// A product of rows with matrices, and what is done to its sums. The matrices are those of the
// gate, or of gate and up next to each other. Operands are as the attribute `optional` names them;
// results are the product, and gate and up if they are kept.
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

Handler<gated<KernelKind::kCooperative>> const gated_handler{"gated_ragged_dot.v3"};
Handler<gated<KernelKind::kSwapped>> const few_rows_handler{"few_rows_dot.v2"};

}  // namespace
}  // namespace jgg
