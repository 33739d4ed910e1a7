// Binding of rank-k and rank-2k updates: check the buffers, list the stacks, launch.
#include "rank_k/rank_k.h"

#include <string>

#include "ffi/element_types.h"
#include "ffi/handlers.h"
#include "ffi/stacks.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

using sm90::ElementType;
using sm90::OtherTriangle;
using sm90::RankKArguments;
using sm90::RankKStack;

// Operands: a, then b in a rank-2k update, then c if it is added or kept, each a stack for every
// result. c and the results are the same memory.
ffi::Error rank_k(cudaStream_t stream, ffi::Buffer<ffi::F32> alpha, ffi::Buffer<ffi::F32> beta,
                  ffi::RemainingArgs operands, ffi::RemainingRets results, bool two_operands,
                  bool has_c, bool transpose, bool upper, bool symmetrize, int32_t tile_m,
                  int32_t tile_n, int32_t cluster) {
  size_t const stacks = results.size();
  size_t const first_c = two_operands ? 2 * stacks : stacks;
  if (stacks == 0 || operands.size() != first_c + (has_c ? stacks : 0)) {
    return invalid("every operand has as many stacks as there are results");
  }
  RankKArguments arguments{};
  arguments.uplo = upper ? Uplo::kUpper : Uplo::kLower;
  arguments.other = symmetrize ? OtherTriangle::kMirrored
                    : has_c    ? OtherTriangle::kKept
                               : OtherTriangle::kZero;
  arguments.adds_c = has_c;
  arguments.transpose = transpose;

  size_t matrices = 0;
  for (size_t i = 0; i < stacks; ++i) {
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!out) return out.error();
    auto const out_shape = StackShape::of(**out);
    if (!out_shape) return out_shape.error();
    auto const a = operands.get<ffi::AnyBuffer>(i);
    if (!a) return a.error();
    auto const shape = StackShape::of(*a);
    if (!shape) return shape.error();

    ElementType type, out_type;
    if (!element_type(a->element_type(), type) || !element_type((*out)->element_type(), out_type) ||
        type == ElementType::kF32 || (out_type != type && out_type != ElementType::kF32)) {
      return invalid("the kernels multiply bf16 or f16 into the same type or f32");
    }
    if (i == 0) {
      arguments.type = type;
      arguments.out_type = out_type;
    }
    int const n = transpose ? shape->columns : shape->rows;
    int const k = transpose ? shape->rows : shape->columns;
    if (type != arguments.type || out_type != arguments.out_type ||
        !(*out_shape == StackShape{shape->count, n, n})) {
      return invalid("result " + std::to_string(i) + " does not fit its operand");
    }

    RankKStack stack{};
    stack.a = a->untyped_data();
    stack.out = (*out)->untyped_data();
    stack.alpha = alpha.typed_data() + matrices;
    stack.beta = beta.typed_data() + matrices;
    stack.matrices = shape->count;
    stack.n = n;
    stack.k = k;
    if (two_operands) {
      auto const b = operands.get<ffi::AnyBuffer>(stacks + i);
      if (!b) return b.error();
      auto const b_shape = StackShape::of(*b);
      if (!b_shape) return b_shape.error();
      if (b->element_type() != a->element_type() || !(*b_shape == *shape)) {
        return invalid("a and b of result " + std::to_string(i) + " differ");
      }
      stack.b = b->untyped_data();
    }
    if (has_c) {
      auto const c = operands.get<ffi::AnyBuffer>(first_c + i);
      if (!c) return c.error();
      if (c->untyped_data() != stack.out) {
        return invalid("c of result " + std::to_string(i) + " is not aliased to it");
      }
    }
    arguments.stacks.push_back(stack);
    matrices += shape->count;
  }
  if (alpha.element_count() != matrices || beta.element_count() != matrices) {
    return invalid("alpha and beta have an element for each matrix");
  }
  return launched(sm90::rank_k({tile_m, tile_n, cluster}, arguments, stream), "rank_k");
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRankK, jgg::rank_k,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // alpha
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // beta
                                  .RemainingArgs()                         // a..., b..., c...
                                  .RemainingRets()                         // out...
                                  .Attr<bool>("two_operands")
                                  .Attr<bool>("has_c")
                                  .Attr<bool>("transpose")
                                  .Attr<bool>("upper")
                                  .Attr<bool>("symmetrize")
                                  .Attr<int32_t>("tile_m")
                                  .Attr<int32_t>("tile_n")
                                  .Attr<int32_t>("cluster"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
