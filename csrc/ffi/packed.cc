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

// `workspace` is null for the kernel without one.
ffi::Error packed_dot(void* workspace, int64_t workspace_bytes, cudaStream_t stream,
                      ffi::AnyBuffer x, ffi::AnyBuffer values, Sizes group_sizes,
                      Sizes group_offset, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      ffi::Dictionary attributes) {
  auto const tokens = Shape<2>::of("x", x);
  if (!tokens) return tokens.error();
  auto out = results.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();
  auto const rows = Shape<2>::of("the result", **out);
  if (!rows) return rows.error();
  Attributes asked(attributes);
  auto const format = asked.get<std::string_view>("format");
  auto const group_size = asked.get<int32_t>("group_size");
  OptionalOperands given(operands, asked.get<std::string_view>("optional"));
  if (asked.error().failure()) return asked.error();
  auto const packing = Packing::of(format, group_size, values, tokens->size[1], rows->size[1]);
  if (!packing) return packing.error();

  packed::Arguments a{};
  a.format = packing->format;
  a.group_size = group_size;
  a.tile_m = asked.get<int32_t>("tile_m", packed::kManyRows);
  if (asked.error().failure()) return asked.error();
  auto error = take({x, group_sizes, group_offset, results}, asked, given, packing->matrices,
                    packing->k, a.product);
  if (error.failure()) return error;
  a.gate = packing->take(given, "", values.untyped_data());
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
  error = take_results(results, has_up, a.product);
  if (error.failure()) return error;

  if (workspace == nullptr) {
    error = whole_vectors("x", x);
    if (error.failure()) return error;
    return launched(packed::decoded_dot(a, stream), "decoded_packed_dot");
  }
  if (workspace_bytes < packed::kPartialBytes) {
    return invalid("the workspace has " + std::to_string(workspace_bytes) +
                   " bytes, but partial sums of a thread block take " +
                   std::to_string(packed::kPartialBytes));
  }
  a.workspace = workspace;
  a.workspace_bytes = workspace_bytes;
  return launched(packed::streamed_dot(a, stream), "streamed_packed_dot");
}

ffi::Error streamed_packed_dot(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                               Sizes group_sizes, Sizes group_offset, ffi::RemainingArgs operands,
                               ffi::Result<ffi::BufferR1<ffi::U8>> workspace,
                               ffi::RemainingRets results, ffi::Dictionary attributes) {
  return packed_dot(workspace->typed_data(), static_cast<int64_t>(workspace->size_bytes()), stream,
                    x, values, group_sizes, group_offset, operands, results, attributes);
}

ffi::Error decoded_packed_dot(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer values,
                              Sizes group_sizes, Sizes group_offset, ffi::RemainingArgs operands,
                              ffi::RemainingRets results, ffi::Dictionary attributes) {
  return packed_dot(nullptr, 0, stream, x, values, group_sizes, group_offset, operands, results,
                    attributes);
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

Handler<streamed_packed_dot> const streamed_handler{"streamed_packed_dot.v1"};
Handler<decoded_packed_dot> const decoded_handler{"decoded_packed_dot.v1"};
Handler<unpack_matrices> const unpack_handler{"unpack_matrices.v1"};

}  // namespace
}  // namespace jgg
