// Binding of rank-k and rank-2k updates: check the buffers, list the stacks, launch.
#include "rank_k/rank_k.h"

#include <string>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/rank_k_operands.h"
#include "ffi/workspace.h"

namespace jgg {
namespace {

// Reads the operands that rank_k_buffers() lists, with scales in float32.
RankKArguments rank_k_arguments(Call& call, ffi::RemainingArgs operands,
                                ffi::RemainingRets results) {
  RankKArguments arguments{};
  RankKForm form = form_of(call, arguments);
  form.has_diagonal = arguments.adds_diagonal = call.get<bool>("has_diagonal");
  // If the other triangle of c is kept, nothing writes it, so c and the result have to be the same
  // memory.
  form.updates_c = arguments.other != OtherTriangle::kMirrored;
  arguments.one_product = call.get<bool>("one_product");
  arguments.may_halve = call.get<bool>("may_halve", false);
  auto const stacks = rank_k_buffers(call, operands, results, form, ffi::F32);
  if (call.failed()) return arguments;
  if (!are_products(stacks[0].type, stacks[0].out_type, arguments.type, arguments.out_type)) {
    call.fail("the kernels multiply bf16, f16 or f32 into the same type or f32");
  }
  // Operands have 16 bits, or are multiplied in parts of 16 bits.
  int64_t const operand_elements = kVectorBytes / 2;
  int64_t const result_elements =
      arguments.out_type == ElementType::kF32 ? kVectorBytes / 4 : kVectorBytes / 2;
  int const products = form.two_operands && !arguments.one_product ? 2 : 1;
  for (RankKBuffers const& stack : stacks) {
    // The kernels compute the two products of a rank-2k update as one product of twice the k.
    call.expect_size("k of all products", int64_t(stack.k) * products);
    int const columns = form.transpose ? stack.n : stack.k;
    if (columns % operand_elements != 0 || stack.n % result_elements != 0) {
      call.fail("rows of " + std::to_string(columns) + " elements, or of " +
                std::to_string(stack.n) +
                " elements of the result, are not a multiple of 16 bytes");
    }
    arguments.stacks.push_back(
        {stack.a, stack.b, stack.out, stack.c, static_cast<float const*>(stack.alpha.values),
         static_cast<float const*>(stack.beta.values), stack.matrices, stack.n, stack.k,
         stack.alpha.stride, stack.beta.stride, static_cast<float const*>(stack.diagonal.values),
         stack.diagonal.stride});
  }
  return arguments;
}

ffi::Error update(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  auto const arguments = rank_k_arguments(call, operands, results);
  if (arguments.type == ElementType::kF32) call.fail("f32 operands have a target of their own");
  if (call.failed()) return call.error();
  return launched(rank_k(tile, arguments, stream), "rank_k");
}

ffi::Error update_f32(cudaStream_t stream, ffi::RemainingArgs operands, WorkspaceResult workspace,
                      ffi::RemainingRets results, ffi::Dictionary attributes) {
  Call call(attributes);
  TileConfig const tile = call.tile();
  auto arguments = rank_k_arguments(call, operands, results);
  if (arguments.type != ElementType::kF32) call.fail("the operands are not f32");
  use_float32_workspace(call, workspace, rank_k_workspace_bytes, arguments);
  if (call.failed()) return call.error();
  return launched(rank_k(tile, arguments, stream), "rank_k_f32");
}

Handler<update> const rank_k_handler{"rank_k.v3"};
Handler<update_f32> const rank_k_f32_handler{"rank_k_f32.v3"};

}  // namespace
}  // namespace jgg
