// Buffers that are stacks of matrices.
#pragma once

#include "ffi/call.h"

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
      auto const error = is_size("a dimension of an operand", size);
      if (error.failure()) return ffi::Unexpected(error);
    }
    return StackShape{static_cast<int>(dimensions[0]), static_cast<int>(dimensions[1]),
                      static_cast<int>(dimensions[2])};
  }

  // The shape of the matrices in the product, if they are stored transposed.
  StackShape transposed(bool transpose) const {
    return transpose ? StackShape{count, columns, rows} : *this;
  }

  bool operator==(StackShape const& other) const {
    return count == other.count && rows == other.rows && columns == other.columns;
  }
};

// A stack of `count` products [m, k] [k, n].
struct ProductShape {
  int count;
  int m;
  int n;
  int k;

  static ffi::ErrorOr<ProductShape> of(ffi::AnyBuffer const& lhs, ffi::AnyBuffer const& rhs,
                                       ffi::AnyBuffer const& out, bool transpose_lhs,
                                       bool transpose_rhs) {
    auto const stored_lhs = StackShape::of(lhs), stored_rhs = StackShape::of(rhs);
    auto const result = StackShape::of(out);
    if (!stored_lhs) return ffi::Unexpected(stored_lhs.error());
    if (!stored_rhs) return ffi::Unexpected(stored_rhs.error());
    if (!result) return ffi::Unexpected(result.error());
    StackShape const a = stored_lhs->transposed(transpose_lhs);
    StackShape const b = stored_rhs->transposed(transpose_rhs);
    if (a.columns != b.rows || a.count != b.count ||
        !(*result == StackShape{a.count, a.rows, b.columns})) {
      return ffi::Unexpected(invalid("the operands of a product do not fit its result"));
    }
    return ProductShape{a.count, a.rows, b.columns, a.columns};
  }
};

}  // namespace jgg
