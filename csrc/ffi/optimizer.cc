// Bindings of the optimiser steps that write FP8 weights. Each result shares the memory of its
// operand. Besides float32, weights have up to three forms: FP8, transposed FP8 and a 16-bit copy.
// The arrays of a form that is not wanted are empty.
#include <string>
#include <vector>

#include "ffi/bindings.h"
#include "ffi/call.h"
#include "ffi/element_types.h"
#include "optimizer/update.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;
using Stack = std::array<int, 3>;

constexpr auto kMoments = {ElementType::kBf16, ElementType::kF32};
constexpr auto kCopies = {ElementType::kBf16, ElementType::kF16};

// Returns a stack of matrices. Fails unless it has `shape` and one of the element types `among`.
optimizer::Elements take_stack(Call& call, char const* name, Buffer const& buffer, Stack shape,
                               std::initializer_list<ElementType> among) {
  optimizer::Elements elements{buffer.untyped_data(), {}};
  if (!element_type(buffer.element_type(), among, elements.type)) {
    call.fail(std::string(name) + " has an element type that no kernel is compiled for");
  }
  call.expect(name, buffer, shape);
  return elements;
}

// Fails unless `result` and `operand` are the same memory, as the call's aliases promise.
void expect_in_place(Call& call, char const* name, Buffer const& operand, Buffer const& result) {
  if (operand.untyped_data() != result.untyped_data()) {
    call.fail(std::string(name) + " is not updated in place");
  }
}

// The names of the weights, which are the last operands and the last results of every call.
constexpr std::array<char const*, 6> kNames = {"master",   "values",   "scales",
                                               "values_t", "scales_t", "copy"};

// Returns the weights in every form. If `parts` is more than 1, the FP8 forms join the columns of
// that many stacks, each padded to whole blocks, and `part` is the number of this stack.
optimizer::Weights weights_of(Call& call, ffi::RemainingArgs const& operands,
                              ffi::RemainingRets const& results) {
  optimizer::Weights weights{};
  weights.power_of_two = call.get<bool>("power_of_two");
  auto const part = call.get<int32_t>("part"), parts = call.get<int32_t>("parts");
  if (parts < 1 || part < 0 || part >= parts) call.fail("part has to be from 0 to parts - 1");
  if (operands.size() != kNames.size() || results.size() != kNames.size()) {
    call.fail("a step takes and returns six arrays of weights");
  }
  if (call.failed()) return weights;
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < kNames.size(); ++i) {
    buffers.push_back(*operands.get<Buffer>(i));
    if (buffers[i].element_count() == 0) continue;
    expect_in_place(call, kNames[i], buffers[i], **results.get<Buffer>(i));
  }
  Buffer const master = buffers[0], values = buffers[1], scales = buffers[2];
  Buffer const values_t = buffers[3], scales_t = buffers[4], copy = buffers[5];
  auto const [matrices, rows, columns] = call.size<3>("master", master);
  bool const joined = parts > 1;
  int const blocks_down = ceil_div(rows, kScaleBlock), blocks = ceil_div(columns, kScaleBlock);
  // Each part is padded to whole blocks.
  int64_t const joined_columns = int64_t{1} * parts * blocks * kScaleBlock;
  if (!call.expect_size("the number of columns of all parts", joined_columns)) return weights;
  int const pitch = joined ? static_cast<int>(joined_columns) : columns;
  int const blocks_across = parts * blocks;
  Stack const shape{matrices, rows, columns};
  take_stack(call, "master", master, shape, {ElementType::kF32});
  bool const plain = values.element_count() != 0, transposed = values_t.element_count() != 0;
  if (!plain && !transposed) call.fail("a step needs at least one FP8 form");
  int64_t const first = int64_t{1} * part * blocks * kScaleBlock;
  int64_t const first_block = int64_t{1} * part * blocks;
  if (plain) {
    weights.fp8 = take_stack(call, "values", values, {matrices, rows, pitch}, kFloat8s).type;
    take_stack(call, "scales", scales, {matrices, blocks_down, blocks_across}, {ElementType::kF32});
    weights.q = static_cast<uint8_t*>(values.untyped_data()) + first;
    weights.scale = static_cast<float*>(scales.untyped_data()) + first_block;
  }
  if (transposed) {
    auto const type =
        take_stack(call, "values_t", values_t, {matrices, pitch, rows}, kFloat8s).type;
    take_stack(call, "scales_t", scales_t, {matrices, blocks_across, blocks_down},
               {ElementType::kF32});
    if (plain && type != weights.fp8) call.fail("both forms of the weights need one FP8 type");
    weights.fp8 = type;
    weights.q_t = static_cast<uint8_t*>(values_t.untyped_data()) + first * rows;
    weights.scale_t = static_cast<float*>(scales_t.untyped_data()) + first_block * blocks_down;
  }
  if (copy.element_count() != 0) weights.copy = take_stack(call, "copy", copy, shape, kCopies);
  weights.master = static_cast<float*>(master.untyped_data());
  weights.matrices = matrices;
  weights.rows = rows;
  weights.columns = columns;
  weights.joined_columns = joined ? pitch : 0;
  return weights;
}

// Returns the address of the scalars. Fails unless there are `count` of them.
float const* take_scalars(Call& call, Floats const& scalars, size_t count) {
  if (scalars.element_count() != count) {
    call.fail("scalars have to be " + std::to_string(count) + " numbers");
  }
  return scalars.typed_data();
}

ffi::Error adamw_quantized(cudaStream_t stream, Floats scalars, Buffer gradient, Buffer mean,
                           Buffer square, ffi::RemainingArgs weights, Result new_mean,
                           Result new_square, ffi::RemainingRets new_weights,
                           ffi::Dictionary attributes) {
  Call call(attributes);
  optimizer::AdamwArguments a{};
  a.weights = weights_of(call, weights, new_weights);
  Stack const shape{a.weights.matrices, a.weights.rows, a.weights.columns};
  a.scalars = reinterpret_cast<optimizer::AdamwScalars const*>(
      take_scalars(call, scalars, sizeof(optimizer::AdamwScalars) / sizeof(float)));
  a.gradient = take_stack(call, "gradient", gradient, shape, kMoments);
  a.mean = take_stack(call, "mean", mean, shape, kMoments);
  a.square = take_stack(call, "square", square, shape, kMoments);
  expect_in_place(call, "mean", mean, *new_mean);
  expect_in_place(call, "square", square, *new_square);
  if (call.failed()) return call.error();
  return launched(optimizer::adamw_quantized(a, stream), "adamw_quantized");
}

// `applies` is 0 if the step is skipped.
ffi::Error apply_and_quantize(cudaStream_t stream, Floats applies, Buffer update,
                              ffi::RemainingArgs weights, ffi::RemainingRets new_weights,
                              ffi::Dictionary attributes) {
  Call call(attributes);
  optimizer::ApplyArguments a{};
  a.weights = weights_of(call, weights, new_weights);
  a.applies = take_scalars(call, applies, 1);
  a.update = take_stack(call, "update", update,
                        {a.weights.matrices, a.weights.rows, a.weights.columns}, kMoments);
  if (call.failed()) return call.error();
  return launched(optimizer::apply_and_quantize(a, stream), "apply_and_quantize");
}

Handler<adamw_quantized> const adamw_handler{"adamw_quantized.v1"};
Handler<apply_and_quantize> const apply_handler{"apply_and_quantize.v1"};

}  // namespace
}  // namespace jgg
