// Bindings of the FP8 quantisers. A result that is not wanted is an array without elements.
#include "quantize/quantize.h"

#include <algorithm>
#include <optional>
#include <string>

#include "ffi/bindings.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/row_blocks.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using quantize::QuantizeFormat;
using Scales = ffi::Result<ffi::Buffer<ffi::F32>>;
using Values = ffi::Result<ffi::AnyBuffer>;
using Indices = ffi::Buffer<ffi::S32>;

int blocks(int size) { return size / kScaleBlock + (size % kScaleBlock != 0); }

// Sets the FP8 type that all forms of the result have.
ffi::Error fp8_type(std::optional<ElementType> fp8, QuantizeFormat& format) {
  if (!fp8) return invalid("no result is asked of a quantiser");
  format.fp8 = *fp8;
  return ffi::Error::Success();
}

ffi::Error source_type(ffi::AnyBuffer const& x, ElementType& type) {
  if (element_type(x.element_type(), kFloats, type)) return ffi::Error::Success();
  return invalid("the quantisers take bf16, f16 or f32");
}

// One form of a result: FP8 values and their scales, or neither.
template <int kRank, int kScaleRank = kRank>
struct Form {
  uint8_t* values = nullptr;
  float* scales = nullptr;

  ffi::Error set(char const* name, Values buffer, Scales scale_buffer,
                 std::array<int, kRank> expected, std::array<int, kScaleRank> expected_scales,
                 int batches, std::optional<ElementType>& fp8) {
    if (buffer->element_count() == 0) return ffi::Error::Success();
    ElementType type;
    if (!element_type(buffer->element_type(), kFloat8s, type)) {
      return invalid("the quantisers return f8e4m3fn or f8e5m2");
    }
    if (fp8 && *fp8 != type) return invalid("both forms of a result have one FP8 type");
    fp8 = type;
    auto const shape = Shape<kRank>::of(name, *buffer);
    if (!shape) return shape.error();
    auto const scale_shape = Shape<kScaleRank>::of("the scales", *scale_buffer);
    if (!scale_shape) return scale_shape.error();
    if (shape->batches != batches || scale_shape->batches != batches) {
      return invalid("a result does not have the batches of the operands");
    }
    if (auto error = shape->expect(expected, batches); error.failure()) return error;
    if (auto error = scale_shape->expect(expected_scales, batches); error.failure()) return error;
    values = static_cast<uint8_t*>(buffer->untyped_data());
    scales = scale_buffer->typed_data();
    return ffi::Error::Success();
  }
};

// Quantises x, or its rows with the numbers `of` if these are given.
ffi::Error quantize_rows_of(cudaStream_t stream, ffi::AnyBuffer x, std::optional<Indices> of,
                            Values values, Scales scales, bool power_of_two) {
  QuantizeFormat format{{}, {}, power_of_two};
  if (auto error = source_type(x, format.source); error.failure()) return error;
  auto const shape = Shape<2>::of("x", x);
  if (!shape) return shape.error();
  auto const [tokens, columns] = shape->size;
  int rows = tokens;
  if (of) {
    auto const of_shape = Shape<1>::of("rows", *of);
    if (!of_shape) return of_shape.error();
    if (shape->batched || of_shape->batched) return invalid("tokens have no batch dimension");
    rows = of_shape->size[0];
  }
  Form<2> form;
  std::optional<ElementType> fp8;
  for (auto error :
       {form.set("values", values, scales, {rows, columns}, {rows, blocks(columns)}, 1, fp8),
        fp8_type(fp8, format)}) {
    if (error.failure()) return error;
  }
  quantize::RowsArguments arguments{x.untyped_data(), form.values, form.scales, rows, columns};
  if (of) {
    arguments.of = of->typed_data();
    arguments.tokens = tokens;
  }
  return launched(quantize::quantize_rows(format, arguments, stream), "quantize_rows");
}

ffi::Error quantize_rows(cudaStream_t stream, ffi::AnyBuffer x, Values values, Scales scales,
                         bool power_of_two) {
  return quantize_rows_of(stream, x, {}, values, scales, power_of_two);
}

ffi::Error quantize_tokens(cudaStream_t stream, ffi::AnyBuffer x, Indices rows, Values values,
                           Scales scales, bool power_of_two) {
  return quantize_rows_of(stream, x, rows, values, scales, power_of_two);
}

ffi::Error quantize_blocks(cudaStream_t stream, ffi::AnyBuffer x, Values values, Scales scales,
                           Values values_t, Scales scales_t, bool power_of_two) {
  QuantizeFormat format{{}, {}, power_of_two};
  if (auto error = source_type(x, format.source); error.failure()) return error;
  auto const shape = Shape<3>::of("x", x);
  if (!shape) return shape.error();
  auto const [matrices, rows, columns] = shape->size;
  Form<3> plain, transposed;
  std::optional<ElementType> fp8;
  for (auto error : {plain.set("values", values, scales, {matrices, rows, columns},
                               {matrices, blocks(rows), blocks(columns)}, 1, fp8),
                     transposed.set("values_t", values_t, scales_t, {matrices, columns, rows},
                                    {matrices, blocks(columns), blocks(rows)}, 1, fp8),
                     fp8_type(fp8, format)}) {
    if (error.failure()) return error;
  }
  return launched(
      quantize::quantize_blocks(format,
                                {x.untyped_data(), plain.values, plain.scales, transposed.values,
                                 transposed.scales, matrices, rows, columns},
                                stream),
      "quantize_blocks");
}

// Two stacks of matrices next to each other, each of them filled up with zeros to whole blocks.
ffi::Error quantize_joined(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, Values values,
                           Scales scales, Values values_t, Scales scales_t, bool power_of_two) {
  QuantizeFormat format{{}, {}, power_of_two};
  if (auto error = source_type(x, format.source); error.failure()) return error;
  if (x.element_type() != y.element_type()) return invalid("the stacks differ in type");
  auto const shape = Shape<3>::of("x", x);
  if (!shape) return shape.error();
  auto const other = Shape<3>::of("y", y);
  if (!other) return other.error();
  auto const [matrices, rows, columns] = shape->size;
  if (auto error = other->expect({matrices, rows, columns}, 1); error.failure()) return error;
  int const padded = blocks(columns) * kScaleBlock, joined = 2 * padded;
  Form<3> plain, transposed;
  std::optional<ElementType> fp8;
  for (auto error : {plain.set("values", values, scales, {matrices, rows, joined},
                               {matrices, blocks(rows), 2 * blocks(columns)}, 1, fp8),
                     transposed.set("values_t", values_t, scales_t, {matrices, joined, rows},
                                    {matrices, 2 * blocks(columns), blocks(rows)}, 1, fp8),
                     fp8_type(fp8, format)}) {
    if (error.failure()) return error;
  }
  cudaError_t status = cudaSuccess;
  for (int const half : {0, 1}) {
    int64_t const first = half * padded, first_block = half * blocks(columns);
    auto const at = [&](auto* data, int64_t offset) { return data ? data + offset : nullptr; };
    quantize::BlocksArguments const arguments{(half ? y : x).untyped_data(),
                                              at(plain.values, first),
                                              at(plain.scales, first_block),
                                              at(transposed.values, first * rows),
                                              at(transposed.scales, first_block * blocks(rows)),
                                              matrices,
                                              rows,
                                              columns,
                                              joined};
    if (status == cudaSuccess) status = quantize::quantize_blocks(format, arguments, stream);
  }
  return launched(status, "quantize_joined");
}

ffi::Error quantize_ragged(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> group_sizes,
                           Values values, Scales scales, Values values_t, Scales scales_t,
                           bool power_of_two) {
  QuantizeFormat format{{}, {}, power_of_two};
  if (auto error = source_type(x, format.source); error.failure()) return error;
  auto const shape = Shape<2>::of("x", x);
  if (!shape) return shape.error();
  auto const sizes = Shape<1>::of("group_sizes", group_sizes);
  if (!sizes) return sizes.error();
  int const batches = std::max(shape->batches, sizes->batches);
  auto const [rows, columns] = shape->size;
  if (auto error = shape->expect({rows, columns}, batches); error.failure()) return error;
  if (auto error = sizes->expect({sizes->size[0]}, batches); error.failure()) return error;

  // One block of each group may be partial. This bound is always enough, and Python allocates it.
  int row_blocks = blocks(rows) + std::min(sizes->size[0], rows);
  if (values_t->element_count() != 0) {
    auto const shape_t = Shape<3>::of("values_t", *values_t);
    if (!shape_t) return shape_t.error();
    row_blocks = shape_t->size[0];
    if (auto error = enough_blocks(rows, sizes->size[0], row_blocks); error.failure()) return error;
  }
  Form<2> plain;
  Form<3, 2> transposed;
  std::optional<ElementType> fp8;
  for (auto error :
       {plain.set("values", values, scales, {rows, columns}, {rows, blocks(columns)}, batches, fp8),
        transposed.set("values_t", values_t, scales_t, {row_blocks, columns, kScaleBlock},
                       {row_blocks, columns}, batches, fp8),
        fp8_type(fp8, format)}) {
    if (error.failure()) return error;
  }
  return launched(quantize::quantize_ragged(
                      format,
                      {x.untyped_data(), group_sizes.typed_data(), plain.values, plain.scales,
                       transposed.values, transposed.scales, batches, shape->batched,
                       sizes->batched, sizes->size[0], rows, columns, row_blocks},
                      stream),
                  "quantize_ragged");
}

ffi::Error column_maxima(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> window,
                         ffi::Result<ffi::Buffer<ffi::F32>> maxima) {
  ElementType source;
  if (auto error = source_type(x, source); error.failure()) return error;
  auto const shape = Shape<2>::of("x", x);
  if (!shape) return shape.error();
  auto const limits = Shape<1>::of("window", window);
  if (!limits) return limits.error();
  auto const found = Shape<2>::of("maxima", *maxima);
  if (!found) return found.error();
  auto const [rows, columns] = shape->size;
  if (shape->batched || limits->batched || found->batched) {
    return invalid("column_maxima has no batch dimension");
  }
  for (auto error : {limits->expect({2}, 1),
                     found->expect({ceil_div(rows, quantize::kColumnRows), columns}, 1)}) {
    if (error.failure()) return error;
  }
  return launched(
      quantize::column_maxima(
          source, {x.untyped_data(), window.typed_data(), maxima->typed_data(), rows, columns},
          stream),
      "column_maxima");
}

// Rows of a ragged product that are copies of tokens, transposed, with scales of tokens' columns.
ffi::Error quantize_gathered(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> row_of,
                             ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> group_sizes,
                             Values values_t, ffi::Result<ffi::Buffer<ffi::U8>> quantized,
                             bool power_of_two) {
  QuantizeFormat format{{}, {}, power_of_two};
  if (auto error = source_type(x, format.source); error.failure()) return error;
  auto const shape = Shape<2>::of("x", x);
  if (!shape) return shape.error();
  auto const index = Shape<1>::of("row_of", row_of);
  if (!index) return index.error();
  auto const scales = Shape<1>::of("scale", scale);
  if (!scales) return scales.error();
  auto const sizes = Shape<1>::of("group_sizes", group_sizes);
  if (!sizes) return sizes.error();
  auto const blocks_t = Shape<3>::of("values_t", *values_t);
  if (!blocks_t) return blocks_t.error();
  if (shape->batched || index->batched || scales->batched || sizes->batched || blocks_t->batched) {
    return invalid("quantize_gathered has no batch dimension");
  }
  auto const [tokens, columns] = shape->size;
  int const rows = index->size[0], row_blocks = blocks_t->size[0];
  for (auto error : {enough_blocks(rows, sizes->size[0], row_blocks), scales->expect({columns}, 1),
                     blocks_t->expect({row_blocks, columns, kScaleBlock}, 1)}) {
    if (error.failure()) return error;
  }
  if (!element_type(values_t->element_type(), kFloat8s, format.fp8)) {
    return invalid("the quantisers return f8e4m3fn or f8e5m2");
  }
  quantize::GatheredArguments arguments{x.untyped_data(),
                                        nullptr,
                                        row_of.typed_data(),
                                        scale.typed_data(),
                                        group_sizes.typed_data(),
                                        static_cast<uint8_t*>(values_t->untyped_data()),
                                        tokens,
                                        sizes->size[0],
                                        rows,
                                        columns,
                                        row_blocks};
  if (quantized->element_count() != 0) {
    auto const room = Shape<2>::of("quantized", *quantized);
    if (!room) return room.error();
    if (auto error = room->expect({tokens, arguments.quantized_pitch()}, 1); error.failure()) {
      return error;
    }
    arguments.quantized = quantized->typed_data();
  }
  return launched(quantize::quantize_gathered(format, arguments, stream), "quantize_gathered");
}

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggQuantizeRows, jgg::quantize_rows,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Ret<xla::ffi::AnyBuffer>()              // values
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                       .Attr<bool>("power_of_two"));
JGG_DEFINE_HANDLER(JggQuantizeTokens, jgg::quantize_tokens,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Arg<jgg::Indices>()                     // rows
                       .Ret<xla::ffi::AnyBuffer>()              // values
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                       .Attr<bool>("power_of_two"));
JGG_DEFINE_HANDLER(JggQuantizeBlocks, jgg::quantize_blocks,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Ret<xla::ffi::AnyBuffer>()              // values
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                       .Ret<xla::ffi::AnyBuffer>()              // values_t
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales_t
                       .Attr<bool>("power_of_two"));
JGG_DEFINE_HANDLER(JggQuantizeJoined, jgg::quantize_joined,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Arg<xla::ffi::AnyBuffer>()              // y
                       .Ret<xla::ffi::AnyBuffer>()              // values
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                       .Ret<xla::ffi::AnyBuffer>()              // values_t
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales_t
                       .Attr<bool>("power_of_two"));
JGG_DEFINE_HANDLER(JggQuantizeRagged, jgg::quantize_ragged,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // group_sizes
                       .Ret<xla::ffi::AnyBuffer>()              // values
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                       .Ret<xla::ffi::AnyBuffer>()              // values_t
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales_t
                       .Attr<bool>("power_of_two"));
JGG_DEFINE_HANDLER(JggColumnMaxima, jgg::column_maxima,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()                // x
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // window
                       .Ret<xla::ffi::Buffer<xla::ffi::F32>>());  // maxima
JGG_DEFINE_HANDLER(JggQuantizeGathered, jgg::quantize_gathered,
                   jgg::on_stream()
                       .Arg<xla::ffi::AnyBuffer>()              // x
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // row_of
                       .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // scale
                       .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // group_sizes
                       .Ret<xla::ffi::AnyBuffer>()              // values_t
                       .Ret<xla::ffi::Buffer<xla::ffi::U8>>()   // room, or nothing
                       .Attr<bool>("power_of_two"));
