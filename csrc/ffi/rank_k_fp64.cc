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

// alpha and beta are of the operands' type.
ffi::Error rank_k_fp64(cudaStream_t stream, ffi::AnyBuffer alpha, ffi::AnyBuffer beta,
                       ffi::RemainingArgs operands, ffi::RemainingRets results, bool two_operands,
                       bool has_c, bool transpose, bool upper, bool symmetrize, bool hermitian,
                       int32_t tile_m, int32_t tile_n, int32_t cluster) {
  auto const stacks = rank_k_buffers(operands, results, two_operands, has_c, transpose);
  if (!stacks) return stacks.error();
  ffi::DataType const type = stacks->front().type;
  for (ffi::AnyBuffer const& scale : {alpha, beta}) {
    if (scale.element_type() != type || scale.element_count() != num_matrices(*stacks)) {
      return invalid("alpha and beta have an element of the operands' type for each matrix");
    }
  }
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
  auto const at = [type](ffi::AnyBuffer const& scale, int matrix) {
    return static_cast<char const*>(scale.untyped_data()) + matrix * ffi::ByteWidth(type);
  };
  for (RankKBuffers const& stack : *stacks) {
    arguments.stacks.push_back({stack.a, stack.b, stack.out, at(alpha, stack.first_matrix),
                                at(beta, stack.first_matrix), stack.matrices, stack.n, stack.k});
  }
  return launched(fp64::rank_k({tile_m, tile_n, cluster}, arguments, stream), "rank_k_fp64");
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRankKFp64, jgg::rank_k_fp64,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()  // alpha
                                  .Arg<xla::ffi::AnyBuffer>()  // beta
                                  .RemainingArgs()             // a..., b..., c...
                                  .RemainingRets()             // out...
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
