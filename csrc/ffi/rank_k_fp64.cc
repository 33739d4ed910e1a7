// Binding of rank-k and rank-2k updates on the FP64 tensor cores.
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
                       bool two_operands, bool has_c, bool transpose, bool upper, bool symmetrize,
                       bool hermitian, int32_t tile_m, int32_t tile_n, int32_t cluster) {
  auto const stacks =
      rank_k_buffers(operands, results, {two_operands, has_c, transpose}, std::nullopt);
  if (!stacks) return stacks.error();
  RankKBuffers const& first = stacks->front();
  RankKArguments arguments{};
  if (!element_type(first.type, kDoubles, arguments.type) || first.out_type != first.type) {
    return invalid("the kernels multiply f64, c64 or c128 into the same type");
  }
  set_update(has_c, transpose, upper, symmetrize, arguments);
  arguments.hermitian = hermitian;
  for (RankKBuffers const& stack : *stacks) {
    arguments.stacks.push_back({stack.a, stack.b, stack.out, stack.alpha.values, stack.beta.values,
                                stack.matrices, stack.n, stack.k, stack.alpha.stride,
                                stack.beta.stride});
  }
  return launched(fp64::rank_k_fp64({tile_m, tile_n, cluster}, arguments, stream), "rank_k_fp64");
}

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggRankKFp64, jgg::rank_k_fp64,
                   jgg::with_tile_attributes(jgg::on_stream()
                                                 .RemainingArgs()  // see rank_k_fp64
                                                 .RemainingRets()  // out...
                                                 .Attr<bool>("two_operands")
                                                 .Attr<bool>("has_c")
                                                 .Attr<bool>("transpose")
                                                 .Attr<bool>("upper")
                                                 .Attr<bool>("symmetrize")
                                                 .Attr<bool>("hermitian")));
