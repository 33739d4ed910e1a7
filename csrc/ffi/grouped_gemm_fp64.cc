// Binding of products of lists of matrices on the FP64 tensor cores.
#include <string>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/stacks.h"
#include "fp64/gemm.h"

namespace jgg {
namespace {

using fp64::GemmArguments;

// Finds the elements of a buffer.
struct Elements {
  ffi::AnyBuffer const& buffer;

  void* at(int64_t index) const {
    return static_cast<char*>(buffer.untyped_data()) +
           index * ffi::ByteWidth(buffer.element_type());
  }

  // Returns the address of a matrix's scale, or of the scale that all matrices share.
  void* of_matrix(int64_t matrix) const { return at(buffer.element_count() == 1 ? 0 : matrix); }
};

// `operands` are lhs..., rhs... and, if the call adds C, c... Each is a list of stacks. c and the
// results are the same memory. alpha and beta have the type of the operands, and one element or
// [matrices]. For the kernels, every matrix is a problem of its own.
ffi::Error grouped_gemm_fp64(cudaStream_t stream, ffi::AnyBuffer alpha, ffi::AnyBuffer beta,
                             ffi::RemainingArgs operands, ffi::RemainingRets results,
                             ffi::Dictionary attributes) {
  Call call(attributes);
  GemmArguments arguments{};
  arguments.adds_c = call.get<bool>("has_c");
  arguments.lhs_transposed = call.get<bool>("transpose_lhs");
  arguments.rhs_transposed = call.get<bool>("transpose_rhs");
  TileConfig const tile = call.tile();
  size_t const stacks = results.size();
  if (stacks < 1 || operands.size() != (arguments.adds_c ? 3 : 2) * stacks) {
    call.fail("every operand has as many stacks as there are results");
  }
  ffi::DataType const type = alpha.element_type();
  if (!element_type(type, kDoubles, arguments.type) || beta.element_type() != type) {
    call.fail("the kernels scale with f64, c64 or c128");
  }
  if (call.failed()) return call.error();

  for (size_t i = 0; i < stacks; ++i) {
    auto const lhs = *operands.get<ffi::AnyBuffer>(i);
    auto const rhs = *operands.get<ffi::AnyBuffer>(stacks + i);
    auto const out = **results.get<ffi::AnyBuffer>(i);
    for (ffi::AnyBuffer const& buffer : {lhs, rhs, out}) {
      if (buffer.element_type() != type) {
        call.fail("operands, results, alpha and beta have one type");
      }
    }
    auto const shape =
        ProductShape::of(call, lhs, rhs, out, arguments.lhs_transposed, arguments.rhs_transposed);
    if (arguments.adds_c &&
        operands.get<ffi::AnyBuffer>(2 * stacks + i)->untyped_data() != out.untyped_data()) {
      call.fail("c of problem " + std::to_string(i) + " is not aliased to its result");
    }
    int64_t const m = shape.m, n = shape.n, k = shape.k;
    for (int64_t matrix = 0; matrix < shape.count; ++matrix) {
      auto const number = static_cast<int64_t>(arguments.problems.size());
      arguments.problems.push_back(
          {Elements{lhs}.at(matrix * m * k), Elements{rhs}.at(matrix * k * n),
           Elements{out}.at(matrix * m * n), Elements{alpha}.of_matrix(number),
           Elements{beta}.of_matrix(number), shape.m, shape.n, shape.k});
    }
  }
  for (ffi::AnyBuffer const& scale : {alpha, beta}) {
    if (scale.element_count() != 1 && scale.element_count() != arguments.problems.size()) {
      call.fail("alpha and beta have one element, or one for each matrix");
    }
  }
  if (call.failed()) return call.error();
  return launched(fp64::gemm_fp64(tile, arguments, stream), "grouped_gemm_fp64");
}

Handler<grouped_gemm_fp64> const grouped_gemm_fp64_handler{"grouped_gemm_fp64.v1"};

}  // namespace
}  // namespace jgg
