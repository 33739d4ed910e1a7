// Buffers that are stacks of matrices.
#pragma once

#include <limits>
#include <string>

#include "ffi/buffers.h"

namespace jgg {

// [count, rows, columns], none of them zero.
struct StackShape {
  int count;
  int rows;
  int columns;

  static ffi::ErrorOr<StackShape> of(ffi::AnyBuffer const& buffer) {
    auto const dimensions = buffer.dimensions();
    if (dimensions.size() != 3) return ffi::Unexpected(invalid("operands are stacks of matrices"));
    for (int64_t const size : dimensions) {
      if (size < 1 || size > std::numeric_limits<int>::max()) {
        return ffi::Unexpected(invalid("an operand has a dimension of " + std::to_string(size)));
      }
    }
    return StackShape{static_cast<int>(dimensions[0]), static_cast<int>(dimensions[1]),
                      static_cast<int>(dimensions[2])};
  }

  // The same matrices as they are meant, if they are stored transposed.
  StackShape transposed(bool transpose) const {
    return transpose ? StackShape{count, columns, rows} : *this;
  }

  bool operator==(StackShape const& other) const {
    return count == other.count && rows == other.rows && columns == other.columns;
  }
};

}  // namespace jgg
