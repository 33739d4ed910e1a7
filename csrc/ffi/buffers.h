// What every binding does with its buffers: check their shapes, report errors.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <limits>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jgg {

namespace ffi = ::xla::ffi;

inline ffi::Error invalid(std::string const& message) {
  return ffi::Error::InvalidArgument(message);
}

inline ffi::Error launched(cudaError_t status, char const* product) {
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

}  // namespace jgg
