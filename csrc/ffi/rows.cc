// Bindings of the kernels that sort and move rows. An operand has a batch dimension, or all batches
// share it.
#include "rows/rows.h"

#include <array>
#include <string>
#include <type_traits>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"

namespace jgg {
namespace {

using rows::Batched;
using Int32 = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<ffi::AnyBuffer>;

ElementType moved_type(Call& call, ffi::AnyBuffer const& x) {
  return call.type(x, kFloats, "the kernels move rows of bf16, f16 or f32");
}

// A call that knows how many batches its results have.
class RowsCall : public Call {
 public:
  using Call::Call;

  void set_batches(int batches) {
    batches_ = batches;
    if (batches > kMostRowBatches) {
      fail("there are " + std::to_string(batches) + " batches, more than " +
           std::to_string(kMostRowBatches));
    }
  }

  // Returns the address of an operand of the expected size, and the distance between its batches:
  // in elements, or in bytes if `T` is void.
  template <class T, class Buffer, size_t kRank>
  Batched<T> take(char const* name, Buffer const& buffer, std::array<int, kRank> expected) {
    auto const found = shape<static_cast<int>(kRank)>(name, buffer);
    expect(found, expected, batches_);
    int64_t stride = std::is_void_v<T> ? ffi::ByteWidth(buffer.element_type()) : 1;
    for (int const size : expected) stride *= size;
    return {static_cast<T*>(buffer.untyped_data()), found.batched ? stride : 0};
  }

  // Returns the address of a result, which has to have all batches.
  template <class T, class Buffer, size_t kRank>
  T* result(char const* name, Buffer& buffer, std::array<int, kRank> expected) {
    auto const found = shape<static_cast<int>(kRank)>(name, buffer);
    if (found.batches != batches_) fail("a result lacks batches");
    expect(found, expected, batches_);
    return static_cast<T*>(buffer.untyped_data());
  }

  // Takes the optional operands: weights [tokens, choices], and the number of valid rows.
  void take_optional(ffi::RemainingArgs const& operands, bool weighted, int tokens, int choices,
                     Batched<float const>& weights, Batched<int const>& count) {
    size_t const most = (weighted ? 1 : 0) + 1;
    if (operands.size() > most) fail("there are more operands than expected");
    if (weighted) {
      auto const buffer = operands.get<Floats>(0);
      if (!buffer) return fail(buffer.error().message());
      weights = take<float const>("weights", *buffer, std::array{tokens, choices});
    }
    if (operands.size() == most) {
      auto const buffer = operands.get<Int32>(most - 1);
      if (!buffer) return fail(buffer.error().message());
      count = take<int const>("count", *buffer, std::array{1});
    }
  }

 private:
  int batches_ = 1;
};

rows::GatherArguments gather_arguments(RowsCall& call, ffi::AnyBuffer const& x, Int32 const& index,
                                       ffi::RemainingArgs const& operands, ffi::AnyBuffer& y) {
  rows::GatherArguments a{};
  auto const tokens = call.shape<2>("x", x), copies = call.shape<2>("the result", y);
  auto const [rows, columns] = copies.size;
  auto const weighted = call.get<bool>("weighted");
  a.divisor = call.divisor();
  a.tokens = tokens.size[0];
  if (y.element_type() != x.element_type()) call.fail("x and the result have one type");
  call.set_batches(copies.batches);
  call.expect_size("the number of pairs", int64_t(a.tokens) * a.divisor);
  a.shape.columns = columns;
  if (ElementType fp8; element_type(x.element_type(), kFloat8s, fp8)) {
    // Two FP8 elements are copied as one element of 16 bits.
    a.shape.type = ElementType::kBf16;
    a.shape.columns = columns / 2;
    if (weighted || columns % 2 != 0) {
      call.fail("FP8 rows are copied as they are, two columns at a time");
    }
  } else {
    a.shape.type = moved_type(call, x);
  }
  a.shape.batches = copies.batches;
  a.rows.rows = rows;
  a.x = call.take<void const>("x", x, std::array{a.tokens, columns});
  a.index = call.take<int const>("the indices", index, std::array{rows});
  call.take_optional(operands, weighted, a.tokens, a.divisor, a.weights, a.rows.count);
  a.y = y.untyped_data();
  return a;
}

ffi::Error gather_rows(cudaStream_t stream, ffi::AnyBuffer x, Int32 index,
                       ffi::RemainingArgs operands, Result y, ffi::Dictionary attributes) {
  RowsCall call(attributes);
  auto const a = gather_arguments(call, x, index, operands, *y);
  if (call.failed()) return call.error();
  return launched(rows::gather_rows(a, stream), "gather_rows");
}

ffi::Error dispatch_rows(cudaStream_t stream, ffi::AnyBuffer x, Int32 index, Int32 row_of_pair,
                         ffi::RemainingArgs operands, Result y, ffi::Dictionary attributes) {
  RowsCall call(attributes);
  rows::DispatchArguments a{gather_arguments(call, x, index, operands, *y), {}};
  int const choices = call.shape<2>("the rows of pairs", row_of_pair).size[1];
  if (call.get<bool>("weighted") && choices != static_cast<int>(a.gather.divisor)) {
    call.fail("every pair has a weight, or none has");
  }
  a.pairs.row =
      call.take<int const>("the rows of pairs", row_of_pair, std::array{a.gather.tokens, choices});
  a.pairs.weights = a.gather.weights;
  a.pairs.tokens = a.gather.tokens;
  a.pairs.choices = choices;
  if (call.failed()) return call.error();
  return launched(rows::dispatch_rows(a, stream), "dispatch_rows");
}

// Checks and returns the arguments that sums and dot products of the rows of pairs share.
template <class Arguments>
Arguments arguments_of_pairs(RowsCall& call, int batches, ffi::AnyBuffer const& y,
                             Int32 const& row_of_pair) {
  Arguments a{};
  auto const [rows, columns] = call.shape<2>("rows", y).size;
  auto const [tokens, choices] = call.shape<2>("the rows of pairs", row_of_pair).size;
  call.set_batches(batches);
  a.shape.type = moved_type(call, y);
  a.shape.columns = columns;
  a.shape.batches = batches;
  a.rows.rows = rows;
  a.pairs.tokens = tokens;
  a.pairs.choices = choices;
  a.y = call.take<void const>("rows", y, std::array{rows, columns});
  a.pairs.row = call.take<int const>("the rows of pairs", row_of_pair, std::array{tokens, choices});
  return a;
}

ffi::Error combine_rows(cudaStream_t stream, ffi::AnyBuffer y, Int32 row_of_pair,
                        ffi::RemainingArgs operands, Result x, ffi::Dictionary attributes) {
  RowsCall call(attributes);
  int const batches = call.shape<2>("the result", *x).batches;
  auto a = arguments_of_pairs<rows::CombineArguments>(call, batches, y, row_of_pair);
  int const tokens = a.pairs.tokens;
  if (x->element_type() != y.element_type()) call.fail("rows and the result have one type");
  call.take_optional(operands, call.get<bool>("weighted"), tokens, a.pairs.choices, a.pairs.weights,
                     a.rows.count);
  a.x = call.result<void>("the result", *x, std::array{tokens, a.shape.columns});
  if (call.failed()) return call.error();
  return launched(rows::combine_rows(a, stream), "combine_rows");
}

ffi::Error row_dots(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, Int32 row_of_pair,
                    ffi::RemainingArgs operands, ffi::Result<Floats> weights,
                    ffi::Dictionary attributes) {
  RowsCall call(attributes);
  int const batches = call.shape<2>("the result", *weights).batches;
  auto a = arguments_of_pairs<rows::DotsArguments>(call, batches, y, row_of_pair);
  int const tokens = a.pairs.tokens, choices = a.pairs.choices;
  if (x.element_type() != y.element_type()) call.fail("x and rows have one element type");
  a.x = call.take<void const>("x", x, std::array{tokens, a.shape.columns});
  call.take_optional(operands, false, tokens, choices, a.pairs.weights, a.rows.count);
  a.weights = call.result<float>("the result", *weights, std::array{tokens, choices});
  if (call.failed()) return call.error();
  return launched(rows::row_dots(a, stream), "row_dots");
}

ffi::Error sort_by_expert(cudaStream_t stream, Int32 expert, ffi::Result<Int32> order,
                          ffi::Result<Int32> inverse, ffi::Result<Int32> group_sizes,
                          ffi::Result<Int32> workspace, ffi::Dictionary attributes) {
  RowsCall call(attributes);
  auto const pairs = call.shape<1>("the experts", expert);
  auto const sizes = call.shape<1>("the group sizes", *group_sizes);
  call.set_batches(pairs.batches);
  rows::SortArguments a{};
  a.batches = pairs.batches;
  a.pairs = pairs.size[0];
  a.experts = sizes.size[0];
  a.blocks = call.shape<2>("the workspace", *workspace).size[0];
  a.expert = expert.typed_data();
  a.order = call.result<int>("the order", *order, pairs.size);
  a.inverse = call.result<int>("the inverse", *inverse, pairs.size);
  a.group_sizes = call.result<int>("the group sizes", *group_sizes, sizes.size);
  a.workspace = call.result<int>("the workspace", *workspace, std::array{a.blocks, a.experts + 1});
  if (call.failed()) return call.error();
  return launched(rows::sort_by_expert(a, stream), "sort_by_expert");
}

Handler<gather_rows> const gather_handler{"gather_rows.v1"};
Handler<dispatch_rows> const dispatch_handler{"dispatch_rows.v1"};
Handler<combine_rows> const combine_handler{"combine_rows.v1"};
Handler<row_dots> const dots_handler{"row_dots.v1"};
Handler<sort_by_expert> const sort_handler{"sort_by_expert.v1"};

}  // namespace
}  // namespace jgg
