// Bindings of the kernels of packed matrices: check the buffers, name the sizes, launch.
#include "packed/packed.h"

#include "ffi/gated_arguments.h"
#include "scheduler/ceil_div.h"

namespace jgg {
namespace {

using packed::Format;
using packed::kSide;

struct NamedFormat {
  std::string_view name;
  Format format;
};
constexpr NamedFormat kFormats[] = {
    {"mxfp4", Format::kMxFp4}, {"int4", Format::kInt4}, {"int8", Format::kInt8}};

// How matrices are packed, and their sizes.
struct Packing {
  Format format;
  int group_size;
  int matrices;
  int k;
  int n;

  static ffi::ErrorOr<Packing> of(std::string_view name, int group_size, ffi::AnyBuffer values,
                                  int k, int n) {
    for (NamedFormat const& known : kFormats) {
      if (known.name != name) continue;
      bool const has_groups = known.format == Format::kInt4;
      if (has_groups && group_size != 32 && group_size != 64 && group_size != 128) {
        return ffi::Unexpected(invalid("groups of int4 have 32, 64 or 128 elements"));
      }
      auto const shape = Shape<4>::of("the packed values", values);
      if (!shape) return ffi::Unexpected(shape.error());
      Packing const packing{known.format, group_size, shape->size[0], k, n};
      std::array const expected{packing.matrices, packing.strips(), packing.records(),
                                packed::record_bytes(known.format)};
      if (values.element_type() != ffi::DataType::U8 || shape->batched || shape->size != expected) {
        return ffi::Unexpected(invalid("the packed values do not fit k and n"));
      }
      return packing;
    }
    return ffi::Unexpected(invalid("no kernel reads the format " + std::string(name)));
  }

  int strips() const { return ceil_div(n, kSide); }
  int records() const { return ceil_div(k, kSide); }

  // The other arrays, whose names begin with `prefix`.
  packed::Matrices take(OptionalOperands& given, std::string const& prefix,
                        void const* values) const {
    packed::Matrices all;
    all.values = static_cast<uint8_t const*>(values);
    auto const bytes = [](void const* data) { return static_cast<uint8_t const*>(data); };
    if (format == Format::kMxFp4) {
      std::array const shape{matrices, strips(), records(), 2 * kSide};
      all.scales = bytes(given.take(prefix + "scales", shape, {ffi::DataType::U8}));
    } else if (format == Format::kInt4) {
      std::array const shape{matrices, strips(), ceil_div(records() * kSide, group_size), kSide};
      all.scales = bytes(given.take(prefix + "scales", shape, {ffi::DataType::BF16}));
      all.zero_points = bytes(given.take(prefix + "zero_points", shape, {ffi::DataType::U8}));
    }
    if (format != Format::kInt4) {
      std::array const shape{matrices, strips() * kSide};
      all.channel_scales = static_cast<float const*>(
          given.take(prefix + "channel_scales", shape, {ffi::DataType::F32}));
    }
    return all;
  }

  // Whether all arrays are there that kernels read.
  bool has_all(packed::Matrices const& all) const {
    return (format == Format::kInt8 || all.scales) &&
           (format == Format::kInt4 || all.channel_scales);
  }
};

// What a call has besides its attributes and the operands that need not be there.
struct PackedCall {
  ffi::AnyBuffer x;
  ffi::AnyBuffer values;
  Sizes group_sizes;
  Sizes group_offset;
  ffi::RemainingRets results;
};

// The arguments of the product of one matrix, or of gate and up.
ffi::Error take(PackedCall call, Attributes& asked, OptionalOperands& given, packed::Arguments& a) {
  auto const tokens = Shape<2>::of("x", call.x);
  if (!tokens) return tokens.error();
  auto out = call.results.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();
  auto const rows = Shape<2>::of("the result", **out);
  if (!rows) return rows.error();
  auto const format = asked.get<std::string_view>("format");
  auto const group_size = asked.get<int32_t>("group_size");
  if (asked.error().failure()) return asked.error();
  auto const packing = Packing::of(format, group_size, call.values, tokens->size[1], rows->size[1]);
  if (!packing) return packing.error();

  a.format = packing->format;
  a.group_size = group_size;
  auto error = take({call.x, call.group_sizes, call.group_offset, call.results}, asked, given,
                    packing->matrices, packing->k, a.product);
  if (error.failure()) return error;
  a.gate = packing->take(given, "", call.values.untyped_data());
  std::array const shape{packing->matrices, packing->strips(), packing->records(),
                         packed::record_bytes(a.format)};
  if (auto const* up = given.take("up_values", shape, {ffi::DataType::U8})) {
    a.up = packing->take(given, "up_", up);
  }
  if (given.error().failure()) return given.error();
  bool const has_up = a.up.values != nullptr;
  if (!packing->has_all(a.gate) || (has_up && !packing->has_all(a.up))) {
    return invalid("scales of the packed matrices are missing");
  }
  if (has_up && !a.gate.zero_points != !a.up.zero_points) {
    return invalid("gate and up both have zero points, or neither has");
  }
  if (has_up && !a.product.has_activation) return invalid("two matrices need an activation");
  return take_results(call.results, has_up, a.product);
}

using Workspace = ffi::Result<ffi::BufferR1<ffi::DataType::U8>>;

ffi::Error take(Workspace workspace, packed::Arguments& a) {
  a.workspace = workspace->typed_data();
  a.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  if (a.workspace_bytes >= packed::kPartialBytes) return ffi::Error::Success();
  return invalid("the workspace has " + std::to_string(a.workspace_bytes) +
                 " bytes, but partial sums of a thread block take " +
                 std::to_string(packed::kPartialBytes));
}

ffi::Error streamed_packed_dot(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                               Sizes group_sizes, Sizes group_offset, ffi::RemainingArgs operands,
                               Workspace workspace, ffi::RemainingRets results,
                               ffi::Dictionary attributes) {
  Attributes asked(attributes);
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  packed::Arguments a{};
  auto error = take({x, values, group_sizes, group_offset, results}, asked, given, a);
  if (error.success()) error = take(workspace, a);
  if (error.failure()) return error;
  return launched(packed::streamed_dot(a, stream), "streamed_packed_dot");
}

// The first of the results are rows of hidden.
ffi::Error streamed_packed_mlp(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                               Sizes group_sizes, Sizes group_offset, ffi::AnyBuffer down_values,
                               ffi::RemainingArgs operands, Workspace workspace,
                               ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets results,
                               ffi::Dictionary attributes) {
  Attributes asked(attributes);
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  packed::Arguments hidden{};
  auto error = take({x, values, group_sizes, group_offset, results}, asked, given, hidden);
  if (error.success()) error = take(workspace, hidden);
  if (error.failure()) return error;
  mlp::GatedArguments const& of_hidden = hidden.product;
  int const m = of_hidden.groups.rows, k = of_hidden.n;
  auto const rows = Shape<2>::of("the result", *out);
  if (!rows) return rows.error();
  if (!hidden.up.values) return invalid("the kernel of an MLP wants a matrix of up");
  if (k % 8 != 0) return invalid("rows of hidden have to be multiples of 16 bytes");
  if (rows->batched || rows->size[0] != m || out->element_type() != ffi::DataType::BF16) {
    return invalid("the result does not fit the rows of hidden");
  }
  int const n = rows->size[1];
  auto const packing =
      Packing::of(asked.get<std::string_view>("format"), hidden.group_size, down_values, k, n);
  if (!packing) return packing.error();
  if (packing->matrices != of_hidden.groups.local_groups) {
    return invalid("the matrices of down do not fit the others");
  }

  packed::Arguments down = hidden;
  down.up = {};
  down.gate = packing->take(given, "down_", down_values.untyped_data());
  mlp::GatedArguments& product = down.product;
  product = {};
  product.x = of_hidden.hidden;
  product.tokens = m;
  product.divisor = 1;
  product.type = of_hidden.type;
  product.groups = of_hidden.groups;
  product.max_sms = of_hidden.max_sms;
  product.k = k;
  product.n = n;
  product.hidden = out->untyped_data();
  if (given.has("down_bias")) {
    std::array const shape{packing->matrices, n};
    constexpr auto kFloat = ffi::DataType::F32;
    product.gate_bias.data = given.take("down_bias", shape, {ffi::DataType::BF16, kFloat});
    product.gate_bias.is_float32 = given.type_of("down_bias") == kFloat;
    product.weights = of_hidden.weights;
  }
  if (given.error().failure()) return given.error();
  if (!packing->has_all(down.gate)) return invalid("scales of the matrices of down are missing");
  // The product of rows that nobody owns reads none of them.
  hidden.product.groups.zeroes_unowned = false;
  return launched(packed::streamed_mlp(hidden, down, stream), "streamed_packed_mlp");
}

ffi::Error decoded_packed_dot(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                              Sizes group_sizes, Sizes group_offset, ffi::RemainingArgs operands,
                              ffi::RemainingRets results, ffi::Dictionary attributes) {
  Attributes asked(attributes);
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  packed::Arguments a{};
  auto error = take({x, values, group_sizes, group_offset, results}, asked, given, a);
  if (error.success()) error = whole_vectors("x", x);
  if (error.failure()) return error;
  return launched(packed::decoded_dot(a, stream), "decoded_packed_dot");
}

ffi::Error unpack_matrices(cudaStream_t stream, ffi::AnyBuffer values, ffi::RemainingArgs operands,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  Attributes asked(attributes);
  auto const format = asked.get<std::string_view>("format");
  auto const group_size = asked.get<int32_t>("group_size");
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  if (asked.error().failure()) return asked.error();
  auto const result = Shape<3>::of("the result", *out);
  if (!result) return result.error();
  if (result->batched || out->element_type() != ffi::DataType::BF16) {
    return invalid("the result has to be bf16 [matrices, k, n]");
  }
  auto const [matrices, k, n] = result->size;
  auto const packing = Packing::of(format, group_size, values, k, n);
  if (!packing) return packing.error();
  if (packing->matrices != matrices) return invalid("the result does not fit the packed values");
  packed::UnpackArguments a{packing->format, group_size, {}, out->untyped_data(), matrices, k, n};
  a.packed = packing->take(given, "", values.untyped_data());
  if (given.error().failure()) return given.error();
  if (!packing->has_all(a.packed)) return invalid("scales of the packed matrices are missing");
  return launched(packed::unpack(a, stream), "unpack_matrices");
}

auto with_operands() {
  return on_stream()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // values of the matrices, or of the gate
      .Arg<Sizes>()           // group_sizes
      .Arg<Sizes>();          // group_offset
}

}  // namespace
}  // namespace jgg

JGG_DEFINE_HANDLER(JggStreamedPackedDot, jgg::streamed_packed_dot,
                   jgg::with_operands()
                       .RemainingArgs()  // as `optional` names them
                       .Ret<jgg::ffi::BufferR1<jgg::ffi::DataType::U8>>()
                       .RemainingRets()  // the result; gate and up, if kept
                       .Attrs());
JGG_DEFINE_HANDLER(JggStreamedPackedMlp, jgg::streamed_packed_mlp,
                   jgg::with_operands()
                       .Arg<jgg::ffi::AnyBuffer>()  // values of down
                       .RemainingArgs()             // as `optional` names them
                       .Ret<jgg::ffi::BufferR1<jgg::ffi::DataType::U8>>()
                       .Ret<jgg::ffi::AnyBuffer>()
                       .RemainingRets()  // hidden
                       .Attrs());
JGG_DEFINE_HANDLER(JggDecodedPackedDot, jgg::decoded_packed_dot,
                   jgg::with_operands()
                       .RemainingArgs()  // as `optional` names them
                       .RemainingRets()  // the result; gate and up, if kept
                       .Attrs());
JGG_DEFINE_HANDLER(JggUnpackMatrices, jgg::unpack_matrices,
                   jgg::on_stream()
                       .Arg<jgg::ffi::AnyBuffer>()  // values
                       .RemainingArgs()             // as the attribute `optional` names them
                       .Ret<jgg::ffi::AnyBuffer>()
                       .Attrs());
