// Bindings of the kernels that sort and move rows. An operand has a batch dimension, or all batches
// share it.
#include "rows/rows.h"

#include <algorithm>
#include <array>
#include <string>

#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "rows/sort_by_expert.h"

namespace jgg {
namespace {

using rows::Batched;
using rows::ElementType;
using Int32 = ffi::Buffer<ffi::S32>;

ffi::Error element_type_of_rows(ffi::AnyBuffer const& x, ElementType& type, int& bytes) {
  bytes = 2;
  switch (x.element_type()) {
    case ffi::DataType::BF16:
      type = ElementType::kBf16;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      type = ElementType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::F32:
      type = ElementType::kF32;
      bytes = 4;
      return ffi::Error::Success();
    default:
      return invalid("the kernels move rows of bf16, f16 or f32");
  }
}

// Whether elements are FP8, which is only moved: two bytes as a number of 16 bits.
bool has_fp8(ffi::AnyBuffer const& x) {
  return x.element_type() == ffi::DataType::F8E4M3FN || x.element_type() == ffi::DataType::F8E5M2;
}

// The operands and the result of a call, checked against each other one by one; the first that does
// not fit is the error.
class Checker {
 public:
  explicit Checker(int batches) : batches_(batches) {
    if (batches > kMostRowBatches) {
      fail(invalid("rows of " + std::to_string(batches) + " batches, more than " +
                   std::to_string(kMostRowBatches)));
    }
  }

  // The address of a buffer of the expected size, and how far its batches are apart.
  template <class T, class Buffer, size_t kRank>
  Batched<T> take(char const* name, Buffer const& buffer, std::array<int, kRank> expected,
                  int64_t element_stride = 1) {
    auto const shape = Shape<static_cast<int>(kRank)>::of(name, buffer);
    if (!shape) return fail(shape.error()), Batched<T>{};
    if (auto error = shape->expect(expected, batches_); error.failure())
      return fail(error), Batched<T>{};
    int64_t stride = element_stride;
    for (int const size : expected) stride *= size;
    return {static_cast<T*>(buffer.untyped_data()), shape->batched ? stride : 0};
  }

  // A result has all batches.
  template <class T, class Buffer, size_t kRank>
  T* result(char const* name, Buffer& buffer, std::array<int, kRank> expected) {
    auto const shape = Shape<static_cast<int>(kRank)>::of(name, buffer);
    if (!shape) return fail(shape.error()), nullptr;
    if (shape->batches != batches_) return fail(invalid("a result lacks batches")), nullptr;
    if (auto error = shape->expect(expected, batches_); error.failure())
      return fail(error), nullptr;
    return static_cast<T*>(buffer.untyped_data());
  }

  // The operands that need not be there: weights [tokens, choices], and the number of valid rows.
  void take_optional(ffi::RemainingArgs const& operands, bool weighted, int tokens, int choices,
                     Batched<float const>& weights, Batched<int const>& count) {
    size_t const most = (weighted ? 1 : 0) + 1;
    if (operands.size() > most) return fail(invalid("there are more operands than expected"));
    if (weighted) {
      auto const buffer = operands.get<ffi::Buffer<ffi::F32>>(0);
      if (!buffer) return fail(buffer.error());
      weights = take<float const>("weights", *buffer, std::array{tokens, choices});
    }
    if (operands.size() == most) {
      auto const buffer = operands.get<Int32>(most - 1);
      if (!buffer) return fail(buffer.error());
      count = take<int const>("count", *buffer, std::array{1});
    }
  }

  void fail(ffi::Error error) {
    if (error_.success()) error_ = std::move(error);
  }

  ffi::Error const& error() const { return error_; }

 private:
  int batches_;
  ffi::Error error_ = ffi::Error::Success();
};

ffi::Error gather_arguments(ffi::AnyBuffer const& x, Int32 const& index,
                            ffi::RemainingArgs const& operands, ffi::AnyBuffer& y, int32_t divisor,
                            bool weighted, rows::GatherArguments& arguments) {
  auto const tokens = Shape<2>::of("x", x);
  if (!tokens) return tokens.error();
  auto const copies = Shape<2>::of("the result", y);
  if (!copies) return copies.error();
  auto const [rows, columns] = copies->size;
  if (divisor < 1) return invalid("divisor has to be positive");
  if (y.element_type() != x.element_type()) return invalid("x and the result have one type");
  Checker checker(copies->batches);
  checker.fail(is_size("the number of pairs", int64_t(tokens->size[0]) * divisor));
  int bytes;
  bool const is_fp8 = has_fp8(x);
  if (is_fp8 && (weighted || columns % 2 != 0 || x.element_type() != y.element_type())) {
    return invalid("FP8 rows are copied as they are, two columns at a time");
  }
  if (is_fp8) {
    arguments.shape.type = ElementType::kBf16, bytes = 1;
  } else {
    checker.fail(element_type_of_rows(x, arguments.shape.type, bytes));
  }
  arguments.shape.columns = is_fp8 ? columns / 2 : columns;
  arguments.shape.batches = copies->batches;
  arguments.tokens = tokens->size[0];
  arguments.divisor = divisor;
  arguments.rows.rows = rows;
  arguments.x = checker.take<void const>("x", x, std::array{arguments.tokens, columns}, bytes);
  arguments.index = checker.take<int const>("the indices", index, std::array{rows});
  checker.take_optional(operands, weighted, arguments.tokens, divisor, arguments.weights,
                        arguments.rows.count);
  arguments.y = y.untyped_data();
  return checker.error();
}

ffi::Error gather_rows(cudaStream_t stream, ffi::AnyBuffer x, Int32 index,
                       ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> y, int32_t divisor,
                       bool weighted) {
  rows::GatherArguments arguments{};
  auto error = gather_arguments(x, index, operands, *y, divisor, weighted, arguments);
  if (error.failure()) return error;
  return launched(rows::gather_rows(arguments, stream), "gather_rows");
}

ffi::Error dispatch_rows(cudaStream_t stream, ffi::AnyBuffer x, Int32 index, Int32 row_of_pair,
                         ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> y,
                         int32_t divisor, bool weighted) {
  rows::DispatchArguments arguments{};
  auto error = gather_arguments(x, index, operands, *y, divisor, weighted, arguments.gather);
  if (error.failure()) return error;
  auto const pairs = Shape<2>::of("the rows of pairs", row_of_pair);
  if (!pairs) return pairs.error();
  rows::GatherArguments const& gather = arguments.gather;
  int const choices = pairs->size[1];
  if (weighted && choices != divisor) return invalid("every pair has a weight, or none has");
  Checker checker(gather.shape.batches);
  arguments.pairs.row =
      checker.take<int const>("the rows of pairs", row_of_pair, std::array{gather.tokens, choices});
  if (checker.error().failure()) return checker.error();
  arguments.pairs.weights = gather.weights;
  arguments.pairs.tokens = gather.tokens;
  arguments.pairs.choices = choices;
  return launched(rows::dispatch_rows(arguments, stream), "dispatch_rows");
}

ffi::Error combine_rows(cudaStream_t stream, ffi::AnyBuffer y, Int32 row_of_pair,
                        ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> x, bool weighted) {
  auto const copies = Shape<2>::of("rows", y);
  if (!copies) return copies.error();
  auto const pairs = Shape<2>::of("the rows of pairs", row_of_pair);
  if (!pairs) return pairs.error();
  auto const sums = Shape<2>::of("the result", *x);
  if (!sums) return sums.error();
  if (x->element_type() != y.element_type()) return invalid("rows and the result have one type");
  auto const [rows, columns] = copies->size;
  auto const [tokens, choices] = pairs->size;
  Checker checker(sums->batches);
  rows::CombineArguments arguments{};
  int bytes;
  checker.fail(element_type_of_rows(y, arguments.shape.type, bytes));
  arguments.shape.columns = columns;
  arguments.shape.batches = sums->batches;
  arguments.rows.rows = rows;
  arguments.pairs.tokens = tokens;
  arguments.pairs.choices = choices;
  arguments.y = checker.take<void const>("rows", y, std::array{rows, columns}, bytes);
  arguments.pairs.row =
      checker.take<int const>("the rows of pairs", row_of_pair, std::array{tokens, choices});
  checker.take_optional(operands, weighted, tokens, choices, arguments.pairs.weights,
                        arguments.rows.count);
  arguments.x = checker.result<void>("the result", *x, std::array{tokens, columns});
  if (checker.error().failure()) return checker.error();
  return launched(rows::combine_rows(arguments, stream), "combine_rows");
}

ffi::Error row_dots(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, Int32 row_of_pair,
                    ffi::RemainingArgs operands, ffi::Result<ffi::Buffer<ffi::F32>> weights) {
  auto const copies = Shape<2>::of("rows", y);
  if (!copies) return copies.error();
  auto const dots = Shape<2>::of("the result", *weights);
  if (!dots) return dots.error();
  auto const [rows, columns] = copies->size;
  auto const [tokens, choices] = dots->size;
  Checker checker(dots->batches);
  rows::DotsArguments arguments{};
  int bytes;
  checker.fail(element_type_of_rows(x, arguments.shape.type, bytes));
  if (x.element_type() != y.element_type()) return invalid("x and rows have one element type");
  arguments.shape.columns = columns;
  arguments.shape.batches = dots->batches;
  arguments.rows.rows = rows;
  arguments.pairs.tokens = tokens;
  arguments.pairs.choices = choices;
  arguments.x = checker.take<void const>("x", x, std::array{tokens, columns}, bytes);
  arguments.y = checker.take<void const>("rows", y, std::array{rows, columns}, bytes);
  arguments.pairs.row =
      checker.take<int const>("the rows of pairs", row_of_pair, std::array{tokens, choices});
  checker.take_optional(operands, false, tokens, choices, arguments.pairs.weights,
                        arguments.rows.count);
  arguments.weights = weights->typed_data();
  if (checker.error().failure()) return checker.error();
  return launched(rows::row_dots(arguments, stream), "row_dots");
}

ffi::Error sort_by_expert(cudaStream_t stream, Int32 expert, ffi::Result<Int32> order,
                          ffi::Result<Int32> inverse, ffi::Result<Int32> group_sizes,
                          ffi::Result<Int32> workspace) {
  auto const pairs = Shape<1>::of("the experts", expert);
  if (!pairs) return pairs.error();
  auto const sizes = Shape<1>::of("the group sizes", *group_sizes);
  if (!sizes) return sizes.error();
  auto const counts = Shape<2>::of("the workspace", *workspace);
  if (!counts) return counts.error();
  int const experts = sizes->size[0], blocks = counts->size[0];
  Checker checker(pairs->batches);
  rows::SortArguments arguments{};
  arguments.expert = expert.typed_data();
  arguments.order = checker.result<int>("the order", *order, pairs->size);
  arguments.inverse = checker.result<int>("the inverse", *inverse, pairs->size);
  arguments.group_sizes = checker.result<int>("the group sizes", *group_sizes, sizes->size);
  arguments.workspace =
      checker.result<int>("the workspace", *workspace, std::array{blocks, experts + 1});
  if (checker.error().failure()) return checker.error();
  arguments.batches = pairs->batches;
  arguments.pairs = pairs->size[0];
  arguments.experts = experts;
  arguments.blocks = blocks;
  return launched(rows::sort_by_expert(arguments, stream), "sort_by_expert");
}

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggGatherRows, jgg::gather_rows,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // indices
                       .RemainingArgs()                         // weights, count
                       .Ret<xla::ffi::AnyBuffer>()              // rows
                       .Attr<int32_t>("divisor")
                       .Attr<bool>("weighted"));
JGG_DEFINE_HANDLER(JggDispatchRows, jgg::dispatch_rows,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // indices
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // rows of pairs
                       .RemainingArgs()                         // weights, count
                       .Ret<xla::ffi::AnyBuffer>()              // rows
                       .Attr<int32_t>("divisor")
                       .Attr<bool>("weighted"));
JGG_DEFINE_HANDLER(JggCombineRows, jgg::combine_rows,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // rows
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // rows of pairs
                       .RemainingArgs()                         // weights, count
                       .Ret<xla::ffi::AnyBuffer>()              // sums
                       .Attr<bool>("weighted"));
JGG_DEFINE_HANDLER(JggRowDots, jgg::row_dots,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()                // x
                       .Arg<xla::ffi::AnyBuffer>()                // rows
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // rows of pairs
                       .RemainingArgs()                           // count
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>());  // inner products
JGG_DEFINE_HANDLER(JggSortByExpert, jgg::sort_by_expert,
                   jgg::on_stream()
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // experts
                       .Ret<xla::ffi::Buffer<xla::ffi::S32>>()    // order
                       .Ret<xla::ffi::Buffer<xla::ffi::S32>>()    // inverse
                       .Ret<xla::ffi::Buffer<xla::ffi::S32>>()    // group_sizes
                       .Ret<xla::ffi::Buffer<xla::ffi::S32>>());  // workspace
