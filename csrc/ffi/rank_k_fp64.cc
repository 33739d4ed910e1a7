// Binding of rank-k and rank-2k updates on the FP64 tensor cores.
#include <optional>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/rank_k_operands.h"
#include "fp64/rank_k.h"

namespace jgg {
namespace {

// Takes the operands that rank_k_buffers() lists, with scales of the matrices' type.
ffi::Error update(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  fp64::RankKArguments arguments{};
  RankKForm const form = form_of(call, arguments);
  arguments.hermitian = call.get<bool>("hermitian");
  auto const stacks = rank_k_buffers(call, operands, results, form, std::nullopt);
  if (call.failed()) return call.error();
  RankKBuffers const& first = stacks.front();
  if (!element_type(first.type, kDoubles, arguments.type) || first.out_type != first.type) {
    return invalid("the kernels multiply f64, c64 or c128 into the same type");
  }
  for (RankKBuffers const& stack : stacks) {
    arguments.stacks.push_back({stack.a, stack.b, stack.out, stack.alpha.values, stack.beta.values,
                                stack.matrices, stack.n, stack.k, stack.alpha.stride,
                                stack.beta.stride});
  }
  return launched(fp64::rank_k_fp64(tile, arguments, stream), "rank_k_fp64");
}

Handler<update> const rank_k_fp64_handler{"rank_k_fp64.v2"};

}  // namespace
}  // namespace jgg
