// Bindings of the kernels of packed matrices: check the buffers, read the sizes, launch.
#include "packed/packed.h"

#include <algorithm>
#include <iterator>

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
constexpr NamedFormat kFormats[] = {{"mxfp4", Format::kMxFp4},
                                    {"int4", Format::kInt4},
                                    {"int8", Format::kInt8},
                                    {"fp8", Format::kFp8},
                                    {"fp8_128x128", Format::kFp8Blocks}};

// How matrices are packed, and their sizes.
struct Packing {
  Format format;
  int group_size;
  int matrices;
  int k;
  int n;

  // Reads the attributes, and checks the values of matrices [k, n].
  static Packing of(Call& call, ffi::AnyBuffer values, int k, int n) {
    Packing packing{Format::kInt8, call.get<int32_t>("group_size"), 0, k, n};
    auto const name = call.get<std::string_view>("format");
    auto const known = std::find_if(std::begin(kFormats), std::end(kFormats),
                                    [&](NamedFormat const& of) { return of.name == name; });
    if (known == std::end(kFormats)) {
      call.fail("no kernel reads the format " + std::string(name));
      return packing;
    }
    packing.format = known->format;
    int const group_size = packing.group_size;
    if (packing.format == Format::kInt4 && group_size != 32 && group_size != 64 &&
        group_size != 128) {
      call.fail("groups of int4 have 32, 64 or 128 elements");
    }
    auto const shape = call.shape<4>("the packed values", values);
    packing.matrices = shape.size[0];
    if (values.element_type() != ffi::DataType::U8 || shape.batched ||
        shape.size != packing.values_shape()) {
      call.fail("the packed values do not fit k and n");
    }
    return packing;
  }

  int strips() const { return ceil_div(n, kSide); }
  int records() const { return ceil_div(k, kSide); }
  std::array<int, 4> values_shape() const {
    return {matrices, strips(), records(), packed::record_bytes(format)};
  }

  // Takes the arrays other than `values`. Their names begin with `prefix`. All arrays of the format
  // except zero points have to be present, because kernels read them.
  packed::Matrices take(Call& call, OptionalOperands& optional, std::string const& prefix,
                        void const* values) const {
    packed::Matrices all;
    all.values = static_cast<uint8_t const*>(values);
    auto const bytes = [](void const* data) { return static_cast<uint8_t const*>(data); };
    if (format == Format::kMxFp4) {
      std::array const shape{matrices, strips(), records(), 2 * kSide};
      all.scales = bytes(optional.take(prefix + "scales", shape, {ffi::DataType::U8}));
    } else if (format == Format::kInt4) {
      std::array const shape{matrices, strips(), ceil_div(records() * kSide, group_size), kSide};
      all.scales = bytes(optional.take(prefix + "scales", shape, {ffi::DataType::BF16}));
      all.zero_points = bytes(optional.take(prefix + "zero_points", shape, {ffi::DataType::U8}));
    } else if (format == Format::kFp8Blocks) {
      std::array const shape{matrices, strips(), records(), 4};
      all.scales = bytes(optional.take(prefix + "scales", shape, {ffi::DataType::F32}));
    }
    if (format != Format::kInt4) {
      std::array const shape{matrices, strips() * kSide};
      all.channel_scales = static_cast<float const*>(
          optional.take(prefix + "channel_scales", shape, {ffi::DataType::F32}));
    }
    bool const of_columns = format == Format::kInt8 || format == Format::kFp8;
    if ((!of_columns && !all.scales) || (format != Format::kInt4 && !all.channel_scales)) {
      call.fail("scales of the packed matrices are missing");
    }
    return all;
  }
};

// The kernel for few rows needs room for the partial sums of at least one thread block.
void expect_workspace(Call& call, int64_t bytes) {
  if (bytes >= packed::kPartialBytes) return;
  call.fail("the workspace has " + std::to_string(bytes) +
            " bytes, but partial sums of a thread block take " +
            std::to_string(packed::kPartialBytes));
}

// `workspace` is null for the decoded kernel, which needs no workspace.
ffi::Error packed_dot(void* workspace, int64_t workspace_bytes, cudaStream_t stream,
                      ffi::AnyBuffer x, ffi::AnyBuffer values, Sizes group_sizes,
                      Sizes group_offset, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      ffi::Dictionary attributes) {
  Call call(attributes);
  OptionalOperands optional(call, operands);
  if (results.size() == 0) return invalid("a call has one to three results");
  auto const [tokens, k] = call.size<2>("x", x);
  auto const [m, n] = call.size<2>("the result", **results.get<ffi::AnyBuffer>(0));
  auto const packing = Packing::of(call, values, k, n);
  packed::Arguments a{};
  a.format = packing.format;
  a.group_size = packing.group_size;
  a.tile_m = call.get<int32_t>("tile_m", packed::kManyRows);
  take({x, group_sizes, group_offset, results}, call, optional, packing.matrices, k, a.product);
  if (call.failed()) return call.error();
  a.gate = packing.take(call, optional, "", values.untyped_data());
  if (auto const* up = optional.take("up_values", packing.values_shape(), {ffi::DataType::U8})) {
    a.up = packing.take(call, optional, "up_", up);
  }
  bool const has_up = a.up.values != nullptr;
  if (has_up && !a.gate.zero_points != !a.up.zero_points) {
    call.fail("gate and up both have zero points, or neither has");
  }
  if (has_up && !a.product.has_activation) call.fail("two matrices need an activation");
  take_results(call, results, has_up, a.product);
  if (workspace == nullptr) {
    call.expect_vectors("x", x);
  } else {
    expect_workspace(call, workspace_bytes);
  }
  if (call.failed()) return call.error();
  if (workspace == nullptr) return launched(packed::decoded_dot(a, stream), "decoded_packed_dot");
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

// Computes a layer of few tokens, whose matrices all have one format. `gate` and `down` are the
// values of wi_0 and of wo.
ffi::Error decode_packed_mlp(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> experts,
                             Floats weights, Sizes group_offset, ffi::AnyBuffer gate,
                             ffi::AnyBuffer down, ffi::RemainingArgs operands,
                             ffi::Result<ffi::BufferR1<ffi::U8>> workspace,
                             ffi::RemainingRets results, ffi::Dictionary attributes) {
  Call call(attributes);
  OptionalOperands optional(call, operands);
  int const local_groups = call.size<4>("the packed values", gate)[0];
  Decoding const all =
      take({x, experts, weights, group_offset, results}, call, optional, local_groups);
  if (call.failed()) return call.error();
  auto const workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  expect_workspace(call, workspace_bytes);
  auto const product = [&](mlp::GatedArguments const& of, ffi::AnyBuffer values,
                           std::string const& name) {
    auto const packing = Packing::of(call, values, of.k, of.n);
    if (packing.matrices != local_groups) call.fail(name + " has another number of matrices");
    packed::Arguments a{of, packing.format,    packing.group_size,      {},
                        {}, packed::kManyRows, workspace->typed_data(), workspace_bytes};
    if (!call.failed()) a.gate = packing.take(call, optional, name + "_", values.untyped_data());
    return a;
  };
  packed::Arguments a = product(all.hidden, gate, "wi_0");
  packed::Arguments const b = product(all.down, down, "wo");
  if (!call.failed() && optional.has("wi_1_values")) {
    a.up = product(all.hidden, optional.buffer("wi_1_values"), "wi_1").gate;
    if (!a.gate.zero_points != !a.up.zero_points) {
      call.fail("gate and up both have zero points, or neither has");
    }
  }
  if (call.failed()) return call.error();
  for (packed::Arguments const* product : {&std::as_const(a), &b}) {
    auto const error = launched(packed::streamed_dot(*product, stream), "decode_packed_mlp");
    if (error.failure()) return error;
  }
  return launched(rows::combine_rows(all.sum, stream), "decode_packed_mlp");
}

ffi::Error unpack_matrices(cudaStream_t stream, ffi::AnyBuffer values, ffi::RemainingArgs operands,
                           ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  Call call(attributes);
  OptionalOperands optional(call, operands);
  auto const [matrices, k, n] = call.size<3>("the result", *out);
  if (out->element_type() != ffi::DataType::BF16) {
    call.fail("the result has to be bf16 [matrices, k, n]");
  }
  auto const packing = Packing::of(call, values, k, n);
  if (packing.matrices != matrices) call.fail("the result does not fit the packed values");
  if (call.failed()) return call.error();
  packed::UnpackArguments a{
      packing.format, packing.group_size, {}, out->untyped_data(), matrices, k, n};
  a.packed = packing.take(call, optional, "", values.untyped_data());
  if (call.failed()) return call.error();
  return launched(packed::unpack(a, stream), "unpack_matrices");
}

Handler<streamed_packed_dot> const streamed_handler{"streamed_packed_dot.v3"};
Handler<decoded_packed_dot> const decoded_handler{"decoded_packed_dot.v3"};
Handler<decode_packed_mlp> const decode_handler{"decode_packed_mlp.v3"};
Handler<unpack_matrices> const unpack_handler{"unpack_matrices.v3"};

}  // namespace
}  // namespace jgg
