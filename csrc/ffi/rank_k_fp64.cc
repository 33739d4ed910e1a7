// Binding of rank-k and rank-2k updates on the FP64 tensor cores.
#include <optional>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/rank_k_operands.h"
#include "fp64/rank_k.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using fp64::RankKArguments;

// Operands: those of rank_k_buffers, with scales of the matrices' type.
ffi::Error rank_k_fp64(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       ffi::Dictionary attributes) {
  Attributes given(attributes);
  auto const two_operands = given.get<bool>("two_operands"), has_c = given.get<bool>("has_c");
  auto const transpose = given.get<bool>("transpose");
  RankKArguments arguments{};
  set_update(has_c, transpose, given.get<bool>("upper"), given.get<bool>("symmetrize"), arguments);
  arguments.hermitian = given.get<bool>("hermitian");
  TileConfig const tile = given.tile();
  if (given.error().failure()) return given.error();
  auto const stacks =
      rank_k_buffers(operands, results, {two_operands, has_c, transpose}, std::nullopt);
  if (!stacks) return stacks.error();
  RankKBuffers const& first = stacks->front();
  if (!element_type(first.type, kDoubles, arguments.type) || first.out_type != first.type) {
    return invalid("the kernels multiply f64, c64 or c128 into the same type");
  }
  for (RankKBuffers const& stack : *stacks) {
    arguments.stacks.push_back({stack.a, stack.b, stack.out, stack.alpha.values, stack.beta.values,
                                stack.matrices, stack.n, stack.k, stack.alpha.stride,
                                stack.beta.stride});
  }
  return launched(fp64::rank_k_fp64(tile, arguments, stream), "rank_k_fp64");
}

Handler<rank_k_fp64> const rank_k_fp64_handler{"rank_k_fp64.v2"};

}  // namespace
}  // namespace jgg
