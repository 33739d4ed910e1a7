// Bindings of the elementwise steps of an expert MLP in FP8.
#include "mlp/quantized_hidden.h"

#include <array>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffer_view.h"
#include "ffi/buffers.h"
#include "ffi/element_types.h"
#include "ffi/row_blocks.h"

namespace jgg {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::Result<ffi::AnyBuffer>;

// Checks buffers one after the other, and keeps what is wrong with the first that does not fit.
class Fit {
 public:
  template <class Buffer>
  void matrix(char const* name, Buffer const& buffer, int rows, int columns) {
    expect<2>(name, buffer, {rows, columns});
  }

  template <class Buffer>
  void cube(char const* name, Buffer const& buffer, std::array<int, 3> size) {
    expect<3>(name, buffer, size);
  }

  template <class Buffer>
  void vector(char const* name, Buffer const& buffer, int size) {
    expect<1>(name, buffer, {size});
  }

  void bf16(std::initializer_list<ffi::DataType> buffers) {
    if (error_.failure()) return;
    for (ffi::DataType const type : buffers) {
      if (type != ffi::DataType::BF16)
        error_ = invalid("the elementwise steps of an MLP take bf16");
    }
  }

  void fp8(ElementType& type, ffi::DataType buffer) {
    if (error_.failure() || element_type(buffer, kFloat8s, type)) return;
    error_ = invalid("the quantisers return f8e4m3fn or f8e5m2");
  }

  ffi::Error const& error() const { return error_; }

 private:
  template <int kRank, class Buffer>
  void expect(char const* name, Buffer const& buffer, std::array<int, kRank> size) {
    if (!error_.failure()) error_ = has_shape<kRank>(name, buffer, size);
  }

  ffi::Error error_ = ffi::Error::Success();
};

// The rows of a result of `columns` columns.
mlp::Projections of_rows(ffi::AnyBuffer const& projections, Floats const& weights, int rows,
                         int columns, mlp::Activation activation, Fit& fit) {
  mlp::Projections result{projections.untyped_data(), weights.typed_data(), activation, rows,
                          columns};
  fit.matrix("the projections", projections, rows, 2 * result.pitch());
  fit.vector("the weights", weights, rows);
  return result;
}

ffi::Error quantize_hidden(cudaStream_t stream, ffi::AnyBuffer projections, Floats weights,
                           ffi::RemainingArgs count, Result values, ffi::Result<Floats> scales,
                           ffi::Dictionary attributes) {
  Attributes given(attributes);
  auto const hidden = Shape<2>::of("the values", *values);
  if (!hidden) return hidden.error();
  auto const [rows, columns] = hidden->size;
  Fit fit;
  mlp::QuantizedHidden a{};
  mlp::QuantizedHiddenFormat format{{}, given.get<bool>("power_of_two")};
  a.projections = of_rows(projections, weights, rows, columns, given.activation(), fit);
  fit.matrix("the values", *values, rows, columns);
  fit.matrix("the scales", *scales, rows, a.projections.blocks());
  fit.bf16({projections.element_type()});
  fit.fp8(format.fp8, values->element_type());
  if (given.error().failure()) return given.error();
  if (fit.error().failure()) return fit.error();
  if (count.size() > 0) {
    auto const buffer = count.get<ffi::Buffer<ffi::S32>>(0);
    if (!buffer) return buffer.error();
    if (auto error = has_shape<1>("the count of rows", *buffer, {1}); error.failure()) return error;
    a.count = buffer->typed_data();
  }
  a.q = static_cast<uint8_t*>(values->untyped_data());
  a.scale = scales->typed_data();
  return launched(mlp::quantize_hidden(format, a, stream), "quantize_hidden");
}

// Takes over the results of the gradients that are not quantised.
void of_gradients(ffi::AnyBuffer dh, Result dgate, Result dup, Result hidden,
                  ffi::Result<Floats> dweights, mlp::QuantizedGradients& a, Fit& fit) {
  int const rows = a.projections.rows, columns = a.projections.columns;
  fit.matrix("the gradient of hidden", dh, rows, columns);
  fit.matrix("the gradient of gate", *dgate, rows, columns);
  fit.matrix("the gradient of up", *dup, rows, columns);
  fit.matrix("hidden", *hidden, rows, columns);
  fit.matrix("the gradients of weights", *dweights, rows, a.projections.blocks());
  a.dh = dh.untyped_data();
  a.dgate = dgate->untyped_data();
  a.dup = dup->untyped_data();
  a.hidden = hidden->untyped_data();
  a.dweights = dweights->typed_data();
}

ffi::Error quantize_gradients(cudaStream_t stream, ffi::AnyBuffer projections, ffi::AnyBuffer dh,
                              Floats weights, Result values, ffi::Result<Floats> scales,
                              Result dgate, Result dup, Result hidden, ffi::Result<Floats> dweights,
                              ffi::Dictionary attributes) {
  Attributes given(attributes);
  auto const shape = Shape<2>::of("the gradient of hidden", dh);
  if (!shape) return shape.error();
  auto const [rows, columns] = shape->size;
  Fit fit;
  mlp::QuantizedGradients a{};
  mlp::QuantizedHiddenFormat format{{}, given.get<bool>("power_of_two")};
  a.projections = of_rows(projections, weights, rows, columns, given.activation(), fit);
  of_gradients(dh, dgate, dup, hidden, dweights, a, fit);
  fit.matrix("the values", *values, rows, 2 * a.projections.pitch());
  fit.matrix("the scales", *scales, rows, 2 * a.projections.blocks());
  fit.bf16({projections.element_type(), dh.element_type(), dgate->element_type(),
            dup->element_type(), hidden->element_type()});
  fit.fp8(format.fp8, values->element_type());
  if (given.error().failure()) return given.error();
  if (fit.error().failure()) return fit.error();
  a.q = static_cast<uint8_t*>(values->untyped_data());
  a.scale = scales->typed_data();
  return launched(mlp::quantize_gradients(format, a, stream), "quantize_gradients");
}

ffi::Error quantize_ragged_gradients(
    cudaStream_t stream, ffi::AnyBuffer projections, ffi::AnyBuffer dh, Floats weights,
    ffi::Buffer<ffi::S32> group_sizes, Result values, ffi::Result<Floats> scales, Result dgate,
    ffi::Result<Floats> dgate_scales, Result dup, ffi::Result<Floats> dup_scales, Result hidden,
    ffi::Result<Floats> hidden_scales, ffi::Result<Floats> dweights, ffi::Dictionary attributes) {
  Attributes given(attributes);
  auto const shape = Shape<2>::of("the gradient of hidden", dh);
  if (!shape) return shape.error();
  auto const [rows, columns] = shape->size;
  auto const sizes = Shape<1>::of("group_sizes", group_sizes);
  if (!sizes) return sizes.error();
  auto const transposed = Shape<3>::of("the gradient of gate", *dgate);
  if (!transposed) return transposed.error();
  int const row_blocks = transposed->size[0];
  if (auto error = enough_blocks(rows, sizes->size[0], row_blocks); error.failure()) return error;
  Fit fit;
  mlp::RaggedGradients a{};
  mlp::RaggedGradientsFormat format{{}, {}, given.get<bool>("power_of_two")};
  a.projections = of_rows(projections, weights, rows, columns, given.activation(), fit);
  int const blocks = a.projections.blocks();
  fit.matrix("the gradient of hidden", dh, rows, columns);
  fit.vector("group_sizes", group_sizes, sizes->size[0]);
  fit.matrix("the values", *values, rows, 2 * a.projections.pitch());
  fit.matrix("the scales", *scales, rows, 2 * blocks);
  std::array<std::pair<Result, ffi::Result<Floats>>, 3> const results{
      {{dgate, dgate_scales}, {dup, dup_scales}, {hidden, hidden_scales}}};
  for (size_t i = 0; i < results.size(); ++i) {
    auto [blocks_of_rows, their_scales] = results[i];
    fit.cube("transposed blocks", *blocks_of_rows, {row_blocks, columns, kScaleBlock});
    fit.matrix("their scales", *their_scales, row_blocks, columns);
    a.transposed[i] = {static_cast<uint8_t*>(blocks_of_rows->untyped_data()),
                       their_scales->typed_data()};
  }
  fit.matrix("the gradients of weights", *dweights, rows, blocks);
  fit.bf16({projections.element_type(), dh.element_type()});
  fit.fp8(format.gradient, values->element_type());
  fit.fp8(format.forward, hidden->element_type());
  if (given.error().failure()) return given.error();
  if (fit.error().failure()) return fit.error();
  if (dgate->element_type() != values->element_type() ||
      dup->element_type() != values->element_type()) {
    return invalid("both forms of gradients have one FP8 type");
  }
  a.dh = dh.untyped_data();
  a.group_sizes = group_sizes.typed_data();
  a.groups = sizes->size[0];
  a.row_blocks = row_blocks;
  a.q = static_cast<uint8_t*>(values->untyped_data());
  a.scale = scales->typed_data();
  a.dweights = dweights->typed_data();
  return launched(mlp::quantize_ragged_gradients(format, a, stream), "quantize_ragged_gradients");
}

// As above, with the values and the transposed gradients of gate and up one after the other in one
// array, which needs memory for one result instead of three.
ffi::Error quantize_joined_gradients(cudaStream_t stream, ffi::AnyBuffer projections,
                                     ffi::AnyBuffer dh, Floats weights,
                                     ffi::Buffer<ffi::S32> group_sizes, Result joined,
                                     ffi::Result<Floats> scales, ffi::Result<Floats> dgate_scales,
                                     ffi::Result<Floats> dup_scales, Result hidden,
                                     ffi::Result<Floats> hidden_scales,
                                     ffi::Result<Floats> dweights, ffi::Dictionary attributes) {
  auto const rows = projections.dimensions(), blocks = hidden->dimensions();
  if (rows.size() != 2 || blocks.size() != 3) return invalid("operands have unsuitable ranks");
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
