// Checks of buffers that all handlers share, and their errors.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <string>

#include "dispatch.h"
#include "largest_sizes.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

namespace ffi = ::xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;

constexpr int64_t kVectorBytes = 16;

inline ffi::Error invalid(std::string const& message) {
  return ffi::Error::InvalidArgument(message);
}

// Whether kernels take a size of `name`, which is not zero.
inline ffi::Error is_size(std::string const& name, int64_t size) {
  if (size >= 1 && size <= kMostSize) return ffi::Error::Success();
  return invalid(name + " is " + std::to_string(size) + ", not one of 1 to " +
                 std::to_string(kMostSize));
}

inline ffi::Error launched(cudaError_t status, char const* product) {
  if (status == cudaSuccess) return ffi::Error::Success();
  if (status == kNotCompiled) {
    return invalid(std::string(product) +
                   ": no kernel is compiled for this tile, kind, element types and majors");
  }
  return ffi::Error::Internal(std::string(product) + ": " + cudaGetErrorString(status));
}

// Whether rows are whole vectors of `bytes`, as TMA and wide loads have to find them.
inline ffi::Error whole_vectors(char const* name, ffi::AnyBuffer const& buffer,
                                int64_t bytes = kVectorBytes) {
  auto const dimensions = buffer.dimensions();
  if (dimensions.size() == 0) return invalid(std::string(name) + " has no rows");
  int64_t const columns = dimensions.back();
  auto const row = columns * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  if (row % bytes == 0) return ffi::Error::Success();
  return invalid(std::string(name) + " has rows of " + std::to_string(columns) +
                 " elements, which are no multiple of " + std::to_string(bytes) + " bytes");
}

// Whether rows are whole vectors, of an operand that is multiplied in parts of 16 bits if it is
// float32.
inline ffi::Error operand_vectors(char const* name, ffi::AnyBuffer const& buffer) {
  bool const in_parts = buffer.element_type() == ffi::F32;
  return whole_vectors(name, buffer, in_parts ? 2 * kVectorBytes : kVectorBytes);
}

// The dimensions of a buffer, told apart from the batch dimension that may come before them.
template <int kRank>
struct Shape {
  char const* name = "";
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
      auto const error = is_size(std::string("a dimension of ") + name, size);
      if (error.failure()) return ffi::Unexpected(error);
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

}  // namespace jgg
