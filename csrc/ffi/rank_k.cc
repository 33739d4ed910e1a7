// Binding of rank-k and rank-2k updates: check the buffers, list the stacks, launch.
#include "rank_k/rank_k.h"

#include <string>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/float32_workspace.h"
#include "ffi/rank_k_operands.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

// The attributes of an update, which all stacks share. Some targets lack those with a default.
struct Update {
  bool two_operands;
  bool has_c;
  bool transpose;
  bool upper;
  bool symmetrize;
  bool one_product;
  bool has_diagonal;
  bool may_halve;
  TileConfig tile;
  int terms;  // see accuracy_of()

  static ffi::ErrorOr<Update> of(ffi::Dictionary attributes) {
    Attributes given(attributes);
    Update const update{given.get<bool>("two_operands"),
                        given.get<bool>("has_c"),
                        given.get<bool>("transpose"),
                        given.get<bool>("upper"),
                        given.get<bool>("symmetrize"),
                        given.get<bool>("one_product"),
                        given.get<bool>("has_diagonal"),
                        given.get<bool>("may_halve", false),
                        given.tile(),
                        given.get<int32_t>("terms", 0)};
    if (given.error().failure()) return ffi::Unexpected(given.error());
    return update;
  }
};

// Operands: those of rank_k_buffers, with scales in float32.
ffi::ErrorOr<RankKArguments> rank_k_arguments(ffi::RemainingArgs operands,
                                              ffi::RemainingRets results, Update const& update) {
  // Whoever keeps the other triangle of c does not write it.
  bool const updates_c = !update.symmetrize;
  RankKForm const form{update.two_operands, update.has_c, update.transpose, update.has_diagonal,
                       updates_c};
  auto const stacks = rank_k_buffers(operands, results, form, ffi::F32);
  if (!stacks) return ffi::Unexpected(stacks.error());
  RankKArguments arguments{};
  if (!are_products(stacks->front().type, stacks->front().out_type, arguments.type,
                    arguments.out_type)) {
    return ffi::Unexpected(
        invalid("the kernels multiply bf16, f16 or f32 into the same type or f32"));
  }
  set_update(update.has_c, update.transpose, update.upper, update.symmetrize, arguments);
  arguments.one_product = update.one_product;
  arguments.adds_diagonal = update.has_diagonal;
  arguments.may_halve = update.may_halve;
  // Operands are of 16 bits, or multiplied in parts of 16 bits.
  int64_t const operand_elements = kVectorBytes / 2;
  int64_t const result_elements =
      arguments.out_type == ElementType::kF32 ? kVectorBytes / 4 : kVectorBytes / 2;
  int const products = update.two_operands && !update.one_product ? 2 : 1;
  for (RankKBuffers const& stack : *stacks) {
    // To the kernels the two products of a rank-2k update are one.
    auto const error = is_size("k of all products", int64_t(stack.k) * products);
    if (error.failure()) return ffi::Unexpected(error);
    int const columns = update.transpose ? stack.n : stack.k;
    if (columns % operand_elements != 0 || stack.n % result_elements != 0) {
      return ffi::Unexpected(invalid("rows of " + std::to_string(columns) + " elements, or of " +
                                     std::to_string(stack.n) +
                                     " of the result, are no multiple of 16 bytes"));
    }
    arguments.stacks.push_back(
        {stack.a, stack.b, stack.out, stack.c, static_cast<float const*>(stack.alpha.values),
         static_cast<float const*>(stack.beta.values), stack.matrices, stack.n, stack.k,
         stack.alpha.stride, stack.beta.stride, static_cast<float const*>(stack.diagonal.values),
         stack.diagonal.stride});
  }
  return arguments;
}

ffi::Error on_rank_k(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     ffi::Dictionary attributes) {
  auto const update = Update::of(attributes);
  if (!update) return update.error();
  auto const arguments = rank_k_arguments(operands, results, *update);
  if (!arguments) return arguments.error();
  if (arguments->type == ElementType::kF32) {
    return invalid("f32 operands have a target of their own");
  }
  return launched(rank_k(update->tile, *arguments, stream), "rank_k");
}

ffi::Error on_rank_k_f32(cudaStream_t stream, ffi::RemainingArgs operands,
                         WorkspaceResult workspace, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  auto const update = Update::of(attributes);
  if (!update) return update.error();
  auto arguments = rank_k_arguments(operands, results, *update);
  if (!arguments) return arguments.error();
  if (arguments->type != ElementType::kF32) return invalid("the operands are not f32");
  if (auto error =
          use_float32_workspace(workspace, update->terms, rank_k_workspace_bytes, *arguments);
      error.failure()) {
    return error;
  }
  return launched(rank_k(update->tile, *arguments, stream), "rank_k_f32");
}

Handler<on_rank_k> const rank_k_handler{"rank_k.v3"};
Handler<on_rank_k_f32> const rank_k_f32_handler{"rank_k_f32.v3"};

}  // namespace
}  // namespace jgg
