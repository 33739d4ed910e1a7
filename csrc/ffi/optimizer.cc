// Bindings of the steps of an optimiser that write FP8 weights. Each result takes the place of its
// operand. A form of the weights that is not wanted is an array without elements.
#include <string>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/bindings.h"
#include "ffi/buffers.h"
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

// A stack of matrices of `shape`, none of whose elements has a type that is not `among` those.
ffi::Error check_stack(char const* name, Buffer const& buffer, Stack shape,
                       std::initializer_list<ElementType> among, ElementType& type) {
  if (!element_type(buffer.element_type(), among, type)) {
    return invalid(std::string(name) + " has an element type that no kernel is compiled for");
  }
  return has_shape<3>(name, buffer, shape);
}

// Checks a stack, and fills in `elements` as the kernels take it.
ffi::Error take_stack(char const* name, Buffer const& buffer, Stack shape,
                      std::initializer_list<ElementType> among, optimizer::Elements& elements) {
  elements.data = buffer.untyped_data();
  return check_stack(name, buffer, shape, among, elements.type);
}

// Whether `result` lies where `operand` does, which the call's aliases promise.
ffi::Error in_place(char const* name, Buffer const& operand, Buffer const& result) {
  if (operand.untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return invalid(std::string(name) + " is not updated in place");
}

// The operands and results of every call from the master weights on.
constexpr std::array<char const*, 6> kNames = {"master",   "values",   "scales",
                                               "values_t", "scales_t", "copy"};

// The weights in every form. Attributes: `power_of_two`, and `part` of `parts`: which columns of
// that many stacks next to each other, each filled up to whole blocks.
ffi::ErrorOr<optimizer::Weights> weights_of(ffi::RemainingArgs const& operands,
                                            ffi::RemainingRets const& results,
                                            ffi::Dictionary attributes) {
  if (operands.size() != kNames.size() || results.size() != kNames.size()) {
    return ffi::Unexpected(invalid("a step takes and returns six arrays of weights"));
  }
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < kNames.size(); ++i) {
    auto const operand = operands.get<Buffer>(i);
    auto result = results.get<Buffer>(i);
    if (!operand) return ffi::Unexpected(operand.error());
    if (!result) return ffi::Unexpected(result.error());
    buffers.push_back(*operand);
    if (operand->element_count() == 0) continue;
    auto const error = in_place(kNames[i], *operand, **result);
    if (error.failure()) return ffi::Unexpected(error);
  }
  Buffer const master = buffers[0], values = buffers[1], scales = buffers[2];
  Buffer const values_t = buffers[3], scales_t = buffers[4], copy = buffers[5];
  Attributes given(attributes);
  auto const power_of_two = given.get<bool>("power_of_two");
  auto const part = given.get<int32_t>("part"), parts = given.get<int32_t>("parts");
  if (given.error().failure()) return ffi::Unexpected(given.error());
  auto const shape = Shape<3>::of("master", master);
  if (!shape) return ffi::Unexpected(shape.error());
  auto const [matrices, rows, columns] = shape->size;
  if (parts < 1 || part < 0 || part >= parts) {
    return ffi::Unexpected(invalid("part is not one of the parts"));
  }
  bool const joined = parts > 1;
  int const blocks_down = ceil_div(rows, kScaleBlock), blocks = ceil_div(columns, kScaleBlock);
  int const pitch = joined ? parts * blocks * kScaleBlock : columns;
  int const blocks_across = parts * blocks;
  ElementType type, type_t;
  optimizer::Weights weights{};
  auto const fail = [](ffi::Error error) { return ffi::Unexpected(std::move(error)); };
  if (auto error =
          check_stack("master", master, {matrices, rows, columns}, {ElementType::kF32}, type);
      error.failure()) {
    return fail(error);
  }
  bool const plain = values.element_count() != 0, transposed = values_t.element_count() != 0;
  if (!plain && !transposed) return fail(invalid("no FP8 form is asked for"));
  int64_t const first = int64_t{1} * part * blocks * kScaleBlock;
  int64_t const first_block = int64_t{1} * part * blocks;
  auto const is_f32 = [](Buffer const& buffer) { return buffer.element_type() == ffi::F32; };
  if (plain) {
    for (auto error :
         {check_stack("values", values, {matrices, rows, pitch}, kFloat8s, weights.fp8),
          has_shape<3>("scales", scales, {matrices, blocks_down, blocks_across})}) {
      if (error.failure()) return fail(error);
    }
    if (!is_f32(scales)) return fail(invalid("scales are float32"));
    weights.q = static_cast<uint8_t*>(values.untyped_data()) + first;
    weights.scale = static_cast<float*>(scales.untyped_data()) + first_block;
  }
  if (transposed) {
    for (auto error :
         {check_stack("values_t", values_t, {matrices, pitch, rows}, kFloat8s, type_t),
          has_shape<3>("scales_t", scales_t, {matrices, blocks_across, blocks_down})}) {
      if (error.failure()) return fail(error);
    }
    if (!is_f32(scales_t)) return fail(invalid("scales_t are float32"));
    if (plain && type_t != weights.fp8) {
      return fail(invalid("both forms of the weights have one FP8 type"));
    }
    weights.fp8 = type_t;
    weights.q_t = static_cast<uint8_t*>(values_t.untyped_data()) + first * rows;
    weights.scale_t = static_cast<float*>(scales_t.untyped_data()) + first_block * blocks_down;
  }
  if (copy.element_count() != 0) {
    auto const error = take_stack("copy", copy, {matrices, rows, columns}, kCopies, weights.copy);
    if (error.failure()) return fail(error);
  }
  weights.master = static_cast<float*>(master.untyped_data());
  weights.power_of_two = power_of_two;
  weights.matrices = matrices;
  weights.rows = rows;
  weights.columns = columns;
  weights.joined_columns = joined ? pitch : 0;
  return weights;
}

// The number of float32 in a buffer.
ffi::Error check_scalars(ffi::Buffer<ffi::F32> const& scalars, int64_t count) {
  if (static_cast<int64_t>(scalars.element_count()) == count) return ffi::Error::Success();
  return invalid("scalars are " + std::to_string(count) + " numbers");
}

ffi::Error adamw_quantized(cudaStream_t stream, ffi::Buffer<ffi::F32> scalars, Buffer gradient,
                           Buffer mean, Buffer square, ffi::RemainingArgs operands, Result new_mean,
                           Result new_square, ffi::RemainingRets results,
                           ffi::Dictionary attributes) {
  auto const weights = weights_of(operands, results, attributes);
  if (!weights) return weights.error();
  optimizer::AdamwArguments arguments{};
  Stack const shape{weights->matrices, weights->rows, weights->columns};
  for (auto error : {check_scalars(scalars, sizeof(optimizer::AdamwScalars) / sizeof(float)),
                     take_stack("gradient", gradient, shape, kMoments, arguments.gradient),
                     take_stack("mean", mean, shape, kMoments, arguments.mean),
                     take_stack("square", square, shape, kMoments, arguments.square),
                     in_place("mean", mean, *new_mean), in_place("square", square, *new_square)}) {
    if (error.failure()) return error;
  }
  arguments.scalars = reinterpret_cast<optimizer::AdamwScalars const*>(scalars.typed_data());
  arguments.weights = *weights;
  return launched(optimizer::adamw_quantized(arguments, stream), "adamw_quantized");
}

ffi::Error apply_and_quantize(cudaStream_t stream, ffi::Buffer<ffi::F32> scalars, Buffer update,
                              ffi::RemainingArgs operands, ffi::RemainingRets results,
                              ffi::Dictionary attributes) {
  auto const weights = weights_of(operands, results, attributes);
  if (!weights) return weights.error();
  optimizer::ApplyArguments arguments{};
  Stack const shape{weights->matrices, weights->rows, weights->columns};
  for (auto error : {check_scalars(scalars, 1),
                     take_stack("update", update, shape, kMoments, arguments.update)}) {
    if (error.failure()) return error;
  }
  arguments.applies = scalars.typed_data();
  arguments.weights = *weights;
  return launched(optimizer::apply_and_quantize(arguments, stream), "apply_and_quantize");
}

auto adamw_binding() {
  return on_stream()
      .Arg<ffi::Buffer<ffi::F32>>()  // scalars
      .Arg<Buffer>()                 // gradient
      .Arg<Buffer>()                 // mean
      .Arg<Buffer>()                 // square
      .RemainingArgs()               // the weights: see kNames
      .Ret<Buffer>()                 // mean
      .Ret<Buffer>()                 // square
      .RemainingRets()               // the weights
      .Attrs();
}

auto apply_binding() {
  return on_stream()
      .Arg<ffi::Buffer<ffi::F32>>()  // whether the update applies
      .Arg<Buffer>()                 // update
      .RemainingArgs()               // the weights: see kNames
      .RemainingRets()               // the weights
      .Attrs();
}

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggAdamwQuantized, jgg::adamw_quantized, jgg::adamw_binding());
JGG_DEFINE_HANDLER(JggApplyAndQuantize, jgg::apply_and_quantize, jgg::apply_binding());
