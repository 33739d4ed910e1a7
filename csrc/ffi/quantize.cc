// Bindings of the FP8 quantisers. The array of a result that is not wanted is empty.
#include "quantize/quantize.h"

#include <algorithm>
#include <optional>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/row_blocks.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using quantize::QuantizeFormat;
using Scales = ffi::Result<Floats>;
using Values = ffi::Result<ffi::AnyBuffer>;
using Indices = ffi::Buffer<ffi::S32>;

int blocks(int size) { return ceil_div(size, kScaleBlock); }

ElementType source_type(Call& call, ffi::AnyBuffer const& x) {
  return call.type(x, kFloats, "the quantisers take bf16, f16 or f32");
}

// The forms of a result that are wanted. All have the same FP8 type, and as many batches as the
// operands.
class Forms {
 public:
  Forms(Call& call, ffi::AnyBuffer const& x, int batches = 1)
      : call_(call),
        batches_(batches),
        format_{source_type(call, x), {}, call.get<bool>("power_of_two")} {}

  // Sets the addresses of values and scales if this form is wanted.
  template <size_t kRank, size_t kScaleRank>
  void take(char const* name, Values values, Scales scales, std::array<int, kRank> expected,
            std::array<int, kScaleRank> expected_scales, uint8_t*& q, float*& scale) {
    if (values->element_count() == 0) return;
    ElementType const type = call_.quantized_type(*values);
    if (is_wanted_ && type != format_.fp8) call_.fail("both forms of a result need one FP8 type");
    format_.fp8 = type;
    is_wanted_ = true;
    auto const shape = call_.shape<static_cast<int>(kRank)>(name, *values);
    auto const scale_shape = call_.shape<static_cast<int>(kScaleRank)>("the scales", *scales);
    if (shape.batches != batches_ || scale_shape.batches != batches_) {
      call_.fail("a result does not have the batches of the operands");
    }
    call_.expect(shape, expected, batches_);
    call_.expect(scale_shape, expected_scales, batches_);
    q = static_cast<uint8_t*>(values->untyped_data());
    scale = scales->typed_data();
  }

  QuantizeFormat const& format() const {
    if (!is_wanted_) call_.fail("a quantiser needs at least one result");
    return format_;
  }

 private:
  Call& call_;
  int batches_;
  QuantizeFormat format_;
  bool is_wanted_ = false;
};

// Quantises x or, if `of` is given, the rows of x whose numbers `of` lists.
ffi::Error quantize_rows_of(cudaStream_t stream, ffi::AnyBuffer x, std::optional<Indices> of,
                            Values values, Scales scales, ffi::Dictionary attributes) {
  Call call(attributes);
  Forms forms(call, x);
  auto const shape = call.shape<2>("x", x);
  auto const [tokens, columns] = shape.size;
  quantize::RowsArguments a{x.untyped_data(), nullptr, nullptr, tokens, columns};
  if (of) {
    if (shape.batched) call.fail("tokens have no batch dimension");
    a.rows = call.size<1>("rows", *of)[0];
    a.of = of->typed_data();
    a.tokens = tokens;
  }
  forms.take("values", values, scales, std::array{a.rows, columns},
             std::array{a.rows, blocks(columns)}, a.q, a.scale);
  auto const format = forms.format();
  if (call.failed()) return call.error();
  return launched(quantize::quantize_rows(format, a, stream), "quantize_rows");
}

ffi::Error quantize_rows(cudaStream_t stream, ffi::AnyBuffer x, Values values, Scales scales,
                         ffi::Dictionary attributes) {
  return quantize_rows_of(stream, x, {}, values, scales, attributes);
}

ffi::Error quantize_tokens(cudaStream_t stream, ffi::AnyBuffer x, Indices rows, Values values,
                           Scales scales, ffi::Dictionary attributes) {
  return quantize_rows_of(stream, x, rows, values, scales, attributes);
}

ffi::Error quantize_blocks(cudaStream_t stream, ffi::AnyBuffer x, Values values, Scales scales,
                           Values values_t, Scales scales_t, ffi::Dictionary attributes) {
  Call call(attributes);
  Forms forms(call, x);
  auto const [matrices, rows, columns] = call.shape<3>("x", x).size;
  int const down = blocks(rows), across = blocks(columns);
  quantize::BlocksArguments a{x.untyped_data(), nullptr,  nullptr, nullptr,
                              nullptr,          matrices, rows,    columns};
  forms.take("values", values, scales, std::array{matrices, rows, columns},
             std::array{matrices, down, across}, a.q, a.scale);
  forms.take("values_t", values_t, scales_t, std::array{matrices, columns, rows},
             std::array{matrices, across, down}, a.q_t, a.scale_t);
  auto const format = forms.format();
  if (call.failed()) return call.error();
  return launched(quantize::quantize_blocks(format, a, stream), "quantize_blocks");
}

// Quantises two stacks of matrices into one stack with their columns next to each other. The
// columns of each stack are padded with zeros to whole blocks.
ffi::Error quantize_joined(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, Values values,
                           Scales scales, Values values_t, Scales scales_t,
                           ffi::Dictionary attributes) {
  Call call(attributes);
  Forms forms(call, x);
  if (x.element_type() != y.element_type()) call.fail("the stacks differ in type");
  auto const [matrices, rows, columns] = call.shape<3>("x", x).size;
  call.expect(call.shape<3>("y", y), {matrices, rows, columns}, 1);
  int const down = blocks(rows), across = blocks(columns);
  int const padded = across * kScaleBlock, joined = 2 * padded;
  quantize::BlocksArguments a{x.untyped_data(), nullptr, nullptr, nullptr, nullptr,
                              matrices,         rows,    columns, joined};
  forms.take("values", values, scales, std::array{matrices, rows, joined},
             std::array{matrices, down, 2 * across}, a.q, a.scale);
  forms.take("values_t", values_t, scales_t, std::array{matrices, joined, rows},
             std::array{matrices, 2 * across, down}, a.q_t, a.scale_t);
  auto const format = forms.format();
  if (call.failed()) return call.error();
  cudaError_t status = quantize::quantize_blocks(format, a, stream);
  a.x = y.untyped_data();
  if (a.q) a.q += padded, a.scale += across;
  if (a.q_t) a.q_t += int64_t(padded) * rows, a.scale_t += int64_t(across) * down;
  if (status == cudaSuccess) status = quantize::quantize_blocks(format, a, stream);
  return launched(status, "quantize_joined");
}

ffi::Error quantize_ragged(cudaStream_t stream, ffi::AnyBuffer x, Sizes group_sizes, Values values,
                           Scales scales, Values values_t, Scales scales_t,
                           ffi::Dictionary attributes) {
  Call call(attributes);
  auto const shape = call.shape<2>("x", x);
  auto const sizes = call.shape<1>("group_sizes", group_sizes);
  int const batches = std::max(shape.batches, sizes.batches), groups = sizes.size[0];
  auto const [rows, columns] = shape.size;
  call.expect(shape, {rows, columns}, batches);
  call.expect(sizes, {groups}, batches);

  // This many blocks are always enough, because each group has at most one partial block. Python
  // allocates as many.
  int row_blocks = blocks(rows) + std::min(groups, rows);
  if (values_t->element_count() != 0) {
    row_blocks = call.shape<3>("values_t", *values_t).size[0];
    expect_enough_blocks(call, rows, groups, row_blocks);
  }
  quantize::RaggedArguments a{x.untyped_data(),
                              group_sizes.typed_data(),
                              nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              batches,
                              shape.batched,
                              sizes.batched,
                              groups,
                              rows,
                              columns,
                              row_blocks};
  Forms forms(call, x, batches);
  forms.take("values", values, scales, std::array{rows, columns}, std::array{rows, blocks(columns)},
             a.q, a.scale);
  forms.take("values_t", values_t, scales_t, std::array{row_blocks, columns, kScaleBlock},
             std::array{row_blocks, columns}, a.q_t, a.scale_t);
  auto const format = forms.format();
  if (call.failed()) return call.error();
  return launched(quantize::quantize_ragged(format, a, stream), "quantize_ragged");
}

ffi::Error column_maxima(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> window,
                         Scales maxima, ffi::Dictionary attributes) {
  Call call(attributes);
  auto const source = source_type(call, x);
  auto const [rows, columns] = call.size<2>("x", x);
  call.expect<1>("window", window, {2});
  call.expect<2>("maxima", *maxima, {ceil_div(rows, quantize::kColumnRows), columns});
  if (call.failed()) return call.error();
  return launched(
      quantize::column_maxima(
          source, {x.untyped_data(), window.typed_data(), maxima->typed_data(), rows, columns},
          stream),
      "column_maxima");
}

// Quantises and transposes rows of a ragged product that are copies of tokens. Each column has one
// scale, which all rows share. `quantized` has room for the quantised tokens, or is empty.
ffi::Error quantize_gathered(cudaStream_t stream, ffi::AnyBuffer x, Indices row_of, Floats scale,
                             Sizes group_sizes, Values values_t,
                             ffi::Result<ffi::Buffer<ffi::U8>> quantized,
                             ffi::Dictionary attributes) {
  Call call(attributes);
  QuantizeFormat const format{source_type(call, x), call.quantized_type(*values_t),
                              call.get<bool>("power_of_two")};
  auto const [tokens, columns] = call.size<2>("x", x);
  auto const [rows] = call.size<1>("row_of", row_of);
  auto const [groups] = call.size<1>("group_sizes", group_sizes);
  int const row_blocks = call.size<3>("values_t", *values_t)[0];
  call.expect<1>("scale", scale, {columns});
  call.expect<3>("values_t", *values_t, {row_blocks, columns, kScaleBlock});
  expect_enough_blocks(call, rows, groups, row_blocks);
  quantize::GatheredArguments a{x.untyped_data(),
                                nullptr,
                                row_of.typed_data(),
                                scale.typed_data(),
                                group_sizes.typed_data(),
                                static_cast<uint8_t*>(values_t->untyped_data()),
                                tokens,
                                groups,
                                rows,
                                columns,
                                row_blocks};
  if (quantized->element_count() != 0) {
    call.expect(call.shape<2>("quantized", *quantized), {tokens, a.quantized_pitch()}, 1);
    a.quantized = quantized->typed_data();
  }
  if (call.failed()) return call.error();
  return launched(quantize::quantize_gathered(format, a, stream), "quantize_gathered");
}

Handler<quantize_rows> const rows_handler{"quantize_rows.v1"};
Handler<quantize_tokens> const tokens_handler{"quantize_tokens.v1"};
Handler<quantize_blocks> const blocks_handler{"quantize_blocks.v1"};
Handler<quantize_joined> const joined_handler{"quantize_joined.v1"};
Handler<quantize_ragged> const ragged_handler{"quantize_ragged.v1"};
Handler<column_maxima> const maxima_handler{"column_maxima.v1"};
Handler<quantize_gathered> const gathered_handler{"quantize_gathered.v2"};

}  // namespace
}  // namespace jgg
