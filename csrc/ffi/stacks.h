// Buffers that are stacks of matrices [count, rows, columns].
#pragma once

#include <array>
#include <utility>

#include "ffi/call.h"

namespace jgg {

// A stack of `count` products of [m, k] and [k, n].
struct ProductShape {
  int count;
  int m;
  int n;
  int k;

  static ProductShape of(Call& call, ffi::AnyBuffer const& lhs, ffi::AnyBuffer const& rhs,
                         ffi::AnyBuffer const& out, bool transpose_lhs, bool transpose_rhs) {
    auto [count, m, k] = call.size<3>("an operand", lhs);
    auto [others, depth, n] = call.size<3>("an operand", rhs);
    if (transpose_lhs) std::swap(m, k);
    if (transpose_rhs) std::swap(depth, n);
    if (depth != k || others != count ||
        call.size<3>("a result", out) != std::array<int, 3>{count, m, n}) {
      call.fail("the operands of a product do not fit its result");
    }
    return {count, m, n, k};
  }
};

}  // namespace jgg
