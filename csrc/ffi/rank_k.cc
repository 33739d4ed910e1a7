// Binding of rank-k and rank-2k updates: check the buffers, list the stacks, launch.
#include "rank_k/rank_k.h"

#include <string>

#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/float32_workspace.h"
#include "ffi/kernel_kind.h"
#include "ffi/rank_k_operands.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using sm90::RankKArguments;

// What is asked of all stacks.
struct Update {
  bool two_operands;
  bool has_c;
  bool transpose;
  bool upper;
  bool symmetrize;
  bool one_product = false;
  bool has_diagonal = false;
  bool may_halve = true;
  bool updates_c = true;
};

// Operands: those of rank_k_buffers, with scales in float32.
ffi::ErrorOr<RankKArguments> rank_k_arguments(ffi::RemainingArgs operands,
                                              ffi::RemainingRets results, Update update) {
  // Whoever keeps the other triangle of c does not write it.
  bool const updates_c = update.updates_c || !update.symmetrize;
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

ffi::Error run_rank_k(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      Update update, int32_t tile_m, int32_t tile_n, int32_t cluster,
                      std::string_view kind) {
  auto const tile = tile_config(tile_m, tile_n, cluster, kind);
  if (!tile) return tile.error();
  auto const arguments = rank_k_arguments(operands, results, update);
  if (!arguments) return arguments.error();
  if (arguments->type == ElementType::kF32)
    return invalid("f32 operands have a target of their own");
  return launched(sm90::rank_k(*tile, *arguments, stream), "rank_k");
}

ffi::Error rank_k(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  bool two_operands, bool has_c, bool transpose, bool upper, bool symmetrize,
                  int32_t tile_m, int32_t tile_n, int32_t cluster, std::string_view kind,
                  bool one_product, bool has_diagonal, bool may_halve) {
  Update const update{two_operands, has_c,        transpose, upper, symmetrize,
                      one_product,  has_diagonal, may_halve, false};
  return run_rank_k(stream, operands, results, update, tile_m, tile_n, cluster, kind);
}

// Version 2 has A B^T + B A^T alone, and results where c is.
ffi::Error rank_k_v2(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     bool two_operands, bool has_c, bool transpose, bool upper, bool symmetrize,
                     int32_t tile_m, int32_t tile_n, int32_t cluster) {
  return run_rank_k(stream, operands, results, {two_operands, has_c, transpose, upper, symmetrize},
                    tile_m, tile_n, cluster, kind_of_size(tile_m == tile_n, "fine"));
}

ffi::Error run_rank_k_f32(cudaStream_t stream, ffi::RemainingArgs operands,
                          WorkspaceResult workspace, ffi::RemainingRets results, Update update,
                          TileConfig tile, int32_t terms) {
  auto arguments = rank_k_arguments(operands, results, update);
  if (!arguments) return arguments.error();
  if (arguments->type != ElementType::kF32) return invalid("the operands are not f32");
  if (auto error =
          use_float32_workspace(workspace, terms, sm90::rank_k_workspace_bytes, *arguments);
      error.failure()) {
    return error;
  }
  return launched(sm90::rank_k(tile, *arguments, stream), "rank_k_f32");
}

ffi::Error rank_k_f32(cudaStream_t stream, ffi::RemainingArgs operands, WorkspaceResult workspace,
                      ffi::RemainingRets results, bool two_operands, bool has_c, bool transpose,
                      bool upper, bool symmetrize, int32_t tile_m, int32_t tile_n, int32_t cluster,
                      int32_t terms, bool one_product, bool has_diagonal) {
  Update const update{two_operands, has_c,        transpose, upper, symmetrize,
                      one_product,  has_diagonal, false,     false};
  return run_rank_k_f32(stream, operands, workspace, results, update, {tile_m, tile_n, cluster},
                        terms);
}

ffi::Error rank_k_f32_v2(cudaStream_t stream, ffi::RemainingArgs operands,
                         WorkspaceResult workspace, ffi::RemainingRets results, bool two_operands,
                         bool has_c, bool transpose, bool upper, bool symmetrize, int32_t tile_m,
                         int32_t tile_n, int32_t cluster, int32_t terms) {
  return run_rank_k_f32(stream, operands, workspace, results,
                        {two_operands, has_c, transpose, upper, symmetrize},
                        {tile_m, tile_n, cluster}, terms);
}

template <class Buffers>
auto with_update(Buffers buffers) {
  return with_tile_attributes(std::move(buffers)
                                  .template Attr<bool>("two_operands")
                                  .template Attr<bool>("has_c")
                                  .template Attr<bool>("transpose")
                                  .template Attr<bool>("upper")
                                  .template Attr<bool>("symmetrize"));
}

// Operands: see rank_k_arguments. The results are `out`s.
auto binding_v2() { return with_update(on_stream().RemainingArgs().RemainingRets()); }

auto binding() {
  return binding_v2()
      .Attr<std::string_view>("kind")
      .Attr<bool>("one_product")
      .Attr<bool>("has_diagonal")
      .Attr<bool>("may_halve");
}

// The same with a workspace before them. `terms`: see accuracy_of()
auto binding_f32_v2() {
  return with_update(on_stream().RemainingArgs().Ret<ffi::Buffer<ffi::U8>>().RemainingRets())
      .Attr<int32_t>("terms");
}

auto binding_f32() { return binding_f32_v2().Attr<bool>("one_product").Attr<bool>("has_diagonal"); }

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggRankK, jgg::rank_k, jgg::binding());
JGG_DEFINE_HANDLER(JggRankKV2, jgg::rank_k_v2, jgg::binding_v2());
JGG_DEFINE_HANDLER(JggRankKF32, jgg::rank_k_f32, jgg::binding_f32());
JGG_DEFINE_HANDLER(JggRankKF32V2, jgg::rank_k_f32_v2, jgg::binding_f32_v2());
