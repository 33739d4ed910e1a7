// Bindings of the two ragged products: check the buffers, name the sizes, launch.
#include "sm90/ragged_dot.h"

#include <array>
#include <limits>
#include <string>

#include "ffi/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {
namespace {

namespace ffi = ::xla::ffi;
using sm90::ElementType;
using sm90::RaggedDotArguments;
using sm90::TileConfig;

ffi::Error invalid(std::string const& message) { return ffi::Error::InvalidArgument(message); }

ffi::Error launched(cudaError_t status, char const* product) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(product) + ": " + cudaGetErrorString(status));
}

// The dimensions of a buffer, told apart from the batch dimension that may come before them.
template <int kRank>
struct Shape {
  char const* name;
  std::array<int, kRank> size;
  int batches;
  bool batched;

  template <class Buffer>
  static ffi::ErrorOr<Shape> of(char const* name, Buffer const& buffer) {
    auto const dimensions = buffer.dimensions();
    bool const batched = dimensions.size() == kRank + 1;
    if (!batched && dimensions.size() != kRank) {
      return ffi::Unexpected(invalid(std::string(name) + " has rank " +
                                     std::to_string(dimensions.size()) + ", not " +
                                     std::to_string(kRank) + " or one more"));
    }
    for (int64_t const size : dimensions) {
      if (size < 1 || size > std::numeric_limits<int>::max()) {
        return ffi::Unexpected(
            invalid(std::string(name) + " has a dimension of " + std::to_string(size)));
      }
    }
    Shape shape{name, {}, batched ? static_cast<int>(dimensions[0]) : 1, batched};
    for (int i = 0; i < kRank; ++i) shape.size[i] = static_cast<int>(dimensions[batched + i]);
    return shape;
  }

  // Operands either share the batch or have all of it.
  ffi::Error expect(std::array<int, kRank> expected, int expected_batches) const {
    if (size == expected && (!batched || batches == expected_batches)) {
      return ffi::Error::Success();
    }
    std::string message = std::string(name) + " does not fit the other operands: expected [";
    for (int const expected_size : expected) message += std::to_string(expected_size) + ", ";
    message.replace(message.size() - 2, 2, "]");
    return invalid(message);
  }
};

std::array<int, 2> matrix(int rows, int columns, bool transpose) {
  return transpose ? std::array<int, 2>{columns, rows} : std::array<int, 2>{rows, columns};
}

bool element_type(ffi::DataType type, ElementType& result) {
  switch (type) {
    case ffi::DataType::BF16:
      result = ElementType::kBf16;
      return true;
    case ffi::DataType::F16:
      result = ElementType::kF16;
      return true;
    case ffi::DataType::F32:
      result = ElementType::kF32;
      return true;
    default:
      return false;
  }
}

using Sizes = ffi::Buffer<ffi::S32>;

// The part that the products have in common: types, pointers and group sizes.
ffi::Error common_arguments(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, Sizes group_sizes,
                            Sizes group_offset, ffi::AnyBuffer out, int batches,
                            RaggedDotArguments& arguments) {
  ElementType rhs_type;
  if (!element_type(lhs.element_type(), arguments.type) ||
      !element_type(rhs.element_type(), rhs_type) ||
      !element_type(out.element_type(), arguments.out_type) || arguments.type != rhs_type ||
      arguments.type == ElementType::kF32 ||
      (arguments.out_type != arguments.type && arguments.out_type != ElementType::kF32)) {
    return invalid("the kernels multiply bf16 or f16 into the same type or f32");
  }
  auto const sizes = Shape<1>::of("group_sizes", group_sizes);
  if (!sizes) return sizes.error();
  auto const offset = Shape<1>::of("group_offset", group_offset);
  if (!offset) return offset.error();
  if (auto error = sizes->expect({sizes->size[0]}, batches); error.failure()) return error;
  if (auto error = offset->expect({1}, batches); error.failure()) return error;

  arguments.lhs = lhs.untyped_data();
  arguments.rhs = rhs.untyped_data();
  arguments.group_sizes = group_sizes.typed_data();
  arguments.group_offset = group_offset.typed_data();
  arguments.out = out.untyped_data();
  arguments.batches = batches;
  arguments.group_sizes_batched = sizes->batched;
  arguments.group_offset_batched = offset->batched;
  arguments.groups = sizes->size[0];
  return ffi::Error::Success();
}

ffi::Error ragged_noncontracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                 Sizes group_sizes, Sizes group_offset,
                                 ffi::Result<ffi::AnyBuffer> out,
                                 ffi::Result<ffi::Buffer<ffi::U8>> /*workspace*/,
                                 bool transpose_lhs, bool transpose_rhs, int32_t tile_m,
                                 int32_t tile_n, int32_t cluster) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<3>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<2>::of("out", *out);
  if (!out_shape) return out_shape.error();

  RaggedDotArguments arguments{};
  if (auto error = common_arguments(lhs, rhs, group_sizes, group_offset, *out, out_shape->batches,
                                    arguments);
      error.failure()) {
    return error;
  }
  auto const [m, n] = out_shape->size;
  int const k = lhs_shape->size[transpose_lhs ? 0 : 1], groups = rhs_shape->size[0];
  if (auto error = lhs_shape->expect(matrix(m, k, transpose_lhs), arguments.batches);
      error.failure()) {
    return error;
  }
  if (auto error = rhs_shape->expect({groups, transpose_rhs ? n : k, transpose_rhs ? k : n},
                                     arguments.batches);
      error.failure()) {
    return error;
  }

  arguments.transpose_lhs = transpose_lhs;
  arguments.transpose_rhs = transpose_rhs;
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.local_groups = groups;
  arguments.m = m;
  arguments.k = k;
  arguments.n = n;
  return launched(sm90::ragged_noncontracting({tile_m, tile_n, cluster}, arguments, stream),
                  "ragged_noncontracting");
}

ffi::Error ragged_contracting(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                              Sizes group_sizes, Sizes group_offset,
                              ffi::Result<ffi::AnyBuffer> out,
                              ffi::Result<ffi::Buffer<ffi::U8>> /*workspace*/, bool transpose_lhs,
                              bool transpose_rhs, int32_t tile_m, int32_t tile_n, int32_t cluster) {
  auto const lhs_shape = Shape<2>::of("lhs", lhs);
  if (!lhs_shape) return lhs_shape.error();
  auto const rhs_shape = Shape<2>::of("rhs", rhs);
  if (!rhs_shape) return rhs_shape.error();
  auto const out_shape = Shape<3>::of("out", *out);
  if (!out_shape) return out_shape.error();

  RaggedDotArguments arguments{};
  if (auto error = common_arguments(lhs, rhs, group_sizes, group_offset, *out, out_shape->batches,
                                    arguments);
      error.failure()) {
    return error;
  }
  auto const [groups, k, n] = out_shape->size;
  int const m = lhs_shape->size[transpose_lhs ? 1 : 0];
  if (auto error = lhs_shape->expect(matrix(m, k, transpose_lhs), arguments.batches);
      error.failure()) {
    return error;
  }
  if (auto error = rhs_shape->expect(matrix(m, n, transpose_rhs), arguments.batches);
      error.failure()) {
    return error;
  }

  arguments.transpose_lhs = transpose_lhs;
  arguments.transpose_rhs = transpose_rhs;
  arguments.lhs_batched = lhs_shape->batched;
  arguments.rhs_batched = rhs_shape->batched;
  arguments.local_groups = groups;
  arguments.m = m;
  arguments.k = k;
  arguments.n = n;
  return launched(sm90::ragged_contracting({tile_m, tile_n, cluster}, arguments, stream),
                  "ragged_contracting");
}

// Buffers and attributes are the same for both products. The workspace is there for schedules that
// need scratch memory: XLA plans it with its own temporaries, and its address outlives a captured
// graph.
auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()        // lhs
      .Arg<ffi::AnyBuffer>()        // rhs
      .Arg<Sizes>()                 // group_sizes
      .Arg<Sizes>()                 // group_offset
      .Ret<ffi::AnyBuffer>()        // out
      .Ret<ffi::Buffer<ffi::U8>>()  // workspace
      .Attr<bool>("transpose_lhs")
      .Attr<bool>("transpose_rhs")
      .Attr<int32_t>("tile_m")
      .Attr<int32_t>("tile_n")
      .Attr<int32_t>("cluster");
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRaggedNoncontracting, jgg::ragged_noncontracting, jgg::binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JggRaggedContracting, jgg::ragged_contracting, jgg::binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
