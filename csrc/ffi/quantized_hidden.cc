// Bindings of the elementwise steps of an expert MLP in FP8.
#include "mlp/quantized_hidden.h"

#include <array>
#include <utility>

#include "ffi/bindings.h"
#include "ffi/buffer_view.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "ffi/groups.h"
#include "ffi/row_blocks.h"

namespace jgg {
namespace {

using Result = ffi::Result<ffi::AnyBuffer>;

void check_bf16(Call& call, std::initializer_list<ffi::AnyBuffer> buffers) {
  for (ffi::AnyBuffer const& buffer : buffers) {
    if (buffer.element_type() != ffi::BF16) {
      call.fail("the elementwise steps of an MLP take bf16");
    }
  }
}

// Checks projections and weights, and returns them. Gate and up have `columns` columns each.
mlp::Projections of_rows(Call& call, ffi::AnyBuffer const& projections, Floats const& weights,
                         int rows, int columns) {
  mlp::Projections result{projections.untyped_data(), weights.typed_data(), call.activation(), rows,
                          columns};
  call.expect<2>("the projections", projections, {rows, 2 * result.pitch()});
  call.expect<1>("the weights", weights, {rows});
  check_bf16(call, {projections});
  return result;
}

// If `count` has an operand, this operand is the number of rows to quantise. Otherwise all rows are
// quantised.
ffi::Error quantize_hidden(cudaStream_t stream, ffi::AnyBuffer projections, Floats weights,
                           ffi::RemainingArgs count, Result values, ffi::Result<Floats> scales,
                           ffi::Dictionary attributes) {
  Call call(attributes);
  auto const [rows, columns] = call.size<2>("the values", *values);
  mlp::QuantizedHidden a{};
  mlp::QuantizedHiddenFormat const format{call.quantized_type(*values),
                                          call.get<bool>("power_of_two")};
  a.projections = of_rows(call, projections, weights, rows, columns);
  call.expect<2>("the scales", *scales, {rows, a.projections.blocks()});
  if (count.size() > 0) {
    auto const buffer = count.get<ffi::Buffer<ffi::S32>>(0);
    if (!buffer) return buffer.error();
    call.expect<1>("the count of rows", *buffer, {1});
    a.count = buffer->typed_data();
  }
  if (call.failed()) return call.error();
  a.q = static_cast<uint8_t*>(values->untyped_data());
  a.scale = scales->typed_data();
  return launched(mlp::quantize_hidden(format, a, stream), "quantize_hidden");
}

ffi::Error quantize_gradients(cudaStream_t stream, ffi::AnyBuffer projections, ffi::AnyBuffer dh,
                              Floats weights, Result values, ffi::Result<Floats> scales,
                              Result dgate, Result dup, Result hidden, ffi::Result<Floats> dweights,
                              ffi::Dictionary attributes) {
  Call call(attributes);
  auto const [rows, columns] = call.size<2>("the gradient of hidden", dh);
  mlp::QuantizedGradients a{};
  mlp::QuantizedHiddenFormat const format{call.quantized_type(*values),
                                          call.get<bool>("power_of_two")};
  a.projections = of_rows(call, projections, weights, rows, columns);
  int const blocks = a.projections.blocks();
  call.expect<2>("the gradient of gate", *dgate, {rows, columns});
  call.expect<2>("the gradient of up", *dup, {rows, columns});
  call.expect<2>("hidden", *hidden, {rows, columns});
  call.expect<2>("the gradients of weights", *dweights, {rows, blocks});
  call.expect<2>("the values", *values, {rows, 2 * a.projections.pitch()});
  call.expect<2>("the scales", *scales, {rows, 2 * blocks});
  check_bf16(call, {dh, *dgate, *dup, *hidden});
  if (call.failed()) return call.error();
  a.dh = dh.untyped_data();
  a.dgate = dgate->untyped_data();
  a.dup = dup->untyped_data();
  a.hidden = hidden->untyped_data();
  a.dweights = dweights->typed_data();
  a.q = static_cast<uint8_t*>(values->untyped_data());
  a.scale = scales->typed_data();
  return launched(mlp::quantize_gradients(format, a, stream), "quantize_gradients");
}

// Like quantize_gradients(), but the gradients of gate and up, and hidden, are returned as
// transposed FP8 blocks, each with scales of its own.
ffi::Error quantize_ragged_gradients(cudaStream_t stream, ffi::AnyBuffer projections,
                                     ffi::AnyBuffer dh, Floats weights, Sizes group_sizes,
                                     Result values, ffi::Result<Floats> scales, Result dgate,
                                     ffi::Result<Floats> dgate_scales, Result dup,
                                     ffi::Result<Floats> dup_scales, Result hidden,
                                     ffi::Result<Floats> hidden_scales,
                                     ffi::Result<Floats> dweights, ffi::Dictionary attributes) {
  Call call(attributes);
  auto const [rows, columns] = call.size<2>("the gradient of hidden", dh);
  auto const [groups] = call.size<1>("group_sizes", group_sizes);
  int const row_blocks = call.size<3>("the gradient of gate", *dgate)[0];
  expect_enough_blocks(call, rows, groups, row_blocks);
  mlp::RaggedGradients a{};
  mlp::RaggedGradientsFormat const format{
      call.quantized_type(*hidden), call.quantized_type(*values), call.get<bool>("power_of_two")};
  a.projections = of_rows(call, projections, weights, rows, columns);
  int const blocks = a.projections.blocks();
  call.expect<2>("the values", *values, {rows, 2 * a.projections.pitch()});
  call.expect<2>("the scales", *scales, {rows, 2 * blocks});
  std::array<std::pair<Result, ffi::Result<Floats>>, 3> const results{
      {{dgate, dgate_scales}, {dup, dup_scales}, {hidden, hidden_scales}}};
  for (size_t i = 0; i < results.size(); ++i) {
    auto [blocks_of_rows, their_scales] = results[i];
    call.expect<3>("transposed blocks", *blocks_of_rows, {row_blocks, columns, kScaleBlock});
    call.expect<2>("the scales of transposed blocks", *their_scales, {row_blocks, columns});
    a.transposed[i] = {static_cast<uint8_t*>(blocks_of_rows->untyped_data()),
                       their_scales->typed_data()};
  }
  call.expect<2>("the gradients of weights", *dweights, {rows, blocks});
  check_bf16(call, {dh});
  if (dgate->element_type() != values->element_type() ||
      dup->element_type() != values->element_type()) {
    call.fail("both forms of gradients must have the same FP8 type");
  }
  if (call.failed()) return call.error();
  a.dh = dh.untyped_data();
  a.group_sizes = group_sizes.typed_data();
  a.groups = groups;
  a.row_blocks = row_blocks;
  a.q = static_cast<uint8_t*>(values->untyped_data());
  a.scale = scales->typed_data();
  a.dweights = dweights->typed_data();
  return launched(mlp::quantize_ragged_gradients(format, a, stream), "quantize_ragged_gradients");
}

// Like quantize_ragged_gradients(), but one array holds the values and the transposed gradients of
// gate and up, one after the other. XLA then needs one free block of memory instead of three.
ffi::Error quantize_joined_gradients(cudaStream_t stream, ffi::AnyBuffer projections,
                                     ffi::AnyBuffer dh, Floats weights, Sizes group_sizes,
                                     Result joined, ffi::Result<Floats> scales,
                                     ffi::Result<Floats> dgate_scales,
                                     ffi::Result<Floats> dup_scales, Result hidden,
                                     ffi::Result<Floats> hidden_scales,
                                     ffi::Result<Floats> dweights, ffi::Dictionary attributes) {
  auto const rows = projections.dimensions(), blocks = hidden->dimensions();
  if (rows.size() != 2 || blocks.size() != 3) return invalid("projections or hidden: wrong rank");
  BufferView values(*joined, 0, {rows.begin(), rows.end()});
  int64_t const of_values = rows[0] * rows[1], of_blocks = blocks[0] * blocks[1] * blocks[2];
  BufferView dgate(*joined, of_values, {blocks.begin(), blocks.end()});
  BufferView dup(*joined, of_values + of_blocks, {blocks.begin(), blocks.end()});
  if (!values.fits() || !dgate.fits() || !dup.fits()) {
    return invalid("the joined gradients do not fit into their array");
  }
  return quantize_ragged_gradients(stream, projections, dh, weights, group_sizes, Result(*values),
                                   scales, Result(*dgate), dgate_scales, Result(*dup), dup_scales,
                                   hidden, hidden_scales, dweights, attributes);
}

Handler<quantize_hidden> const hidden_handler{"quantize_hidden.v1"};
Handler<quantize_gradients> const gradients_handler{"quantize_gradients.v1"};
Handler<quantize_ragged_gradients> const ragged_handler{"quantize_ragged_gradients.v1"};
Handler<quantize_joined_gradients> const joined_handler{"quantize_joined_gradients.v1"};

}  // namespace
}  // namespace jgg
