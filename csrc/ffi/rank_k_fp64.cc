// Binding of rank-k and rank-2k updates on the FP64 tensor cores.
#include "ffi/buffers.h"
#include "ffi/fp64_element_type.h"
#include "ffi/handlers.h"
#include "ffi/rank_k_operands.h"
#include "fp64/rank_k.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using fp64::OtherTriangle;
using fp64::RankKArguments;

// Operands: alpha of each stack, beta of each if there is a c, both of the matrices' type, then
// matrices as in rank_k_buffers.
ffi::Error rank_k_fp64(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       bool two_operands, bool has_c, bool transpose, bool upper, bool symmetrize,
                       bool hermitian, int32_t tile_m, int32_t tile_n, int32_t cluster) {
  size_t const count = results.size(), first_matrix = has_c ? 2 * count : count;
  auto const stacks =
      rank_k_buffers(operands, results, two_operands, has_c, transpose, first_matrix);
  if (!stacks) return stacks.error();
  ffi::DataType const type = stacks->front().type;
  RankKArguments arguments{};
  if (!element_type(type, arguments.type) || stacks->front().out_type != type) {
    return invalid("the kernels multiply f64, c64 or c128 into the same type");
  }
  arguments.uplo = upper ? Uplo::kUpper : Uplo::kLower;
  arguments.other = symmetrize ? OtherTriangle::kMirrored
                    : has_c    ? OtherTriangle::kKept
                               : OtherTriangle::kZero;
  arguments.adds_c = has_c;
  arguments.transpose = transpose;
  arguments.hermitian = hermitian;
  for (size_t i = 0; i < count; ++i) {
    RankKBuffers const& stack = (*stacks)[i];
    auto const alpha = RankKScales::of(operands, i, type, stack.matrices);
    if (!alpha) return alpha.error();
    auto const beta = RankKScales::of(operands, has_c ? count + i : i, type, stack.matrices);
    if (!beta) return beta.error();
    arguments.stacks.push_back({stack.a, stack.b, stack.out, alpha->values, beta->values,
                                stack.matrices, stack.n, stack.k, alpha->stride, beta->stride});
  }
  return launched(fp64::rank_k({tile_m, tile_n, cluster}, arguments, stream), "rank_k_fp64");
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRankKFp64, jgg::rank_k_fp64,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()  // see rank_k_fp64
                                  .RemainingRets()  // out...
                                  .Attr<bool>("two_operands")
                                  .Attr<bool>("has_c")
                                  .Attr<bool>("transpose")
                                  .Attr<bool>("upper")
                                  .Attr<bool>("symmetrize")
                                  .Attr<bool>("hermitian")
                                  .Attr<int32_t>("tile_m")
                                  .Attr<int32_t>("tile_n")
                                  .Attr<int32_t>("cluster"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
