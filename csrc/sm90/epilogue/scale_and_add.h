// Computes alpha * accumulators + beta * C before a tile is stored.
#pragma once

#include <cutlass/array.h>

#include <cute/tensor.hpp>

#include "sm90/epilogue/subtile.h"

namespace jgg::sm90 {

// accumulators = alpha * accumulators + beta * C, for a half tile. `c` points to the half tile's
// first element in C, a matrix of `pitch` columns. Rows of C are multiples of 16 bytes. C has
// `rows` more rows and `columns` more columns from that element on. As in BLAS, C is not read if
// beta is zero.
template <class Output, class Accumulators>
__device__ void scale_and_add(Accumulators& accumulators, float alpha, float beta, Output const* c,
                              int64_t pitch, int rows, int columns) {
  constexpr int kCount = decltype(cute::size(accumulators))::value;
#pragma unroll
  for (int i = 0; i < kCount; ++i) accumulators(i) *= alpha;
  if (beta == 0.0f) return;

  using Pair = cutlass::AlignedArray<Output, 2>;
  int const row = accumulator_row(0), column = accumulator_column(0);
  Output const* const first = c + row * pitch + column;
  Output const* const halves[] = {first, first + 8 * pitch};
  bool const inside[] = {row < rows, row + 8 < rows};
  columns -= column;
  // All loads of a batch are under way before the first value is used.
  constexpr int kBatch = 64 / sizeof(Output);
  static_assert(kCount % kBatch == 0);
#pragma unroll
  for (int start = 0; start < kCount; start += kBatch) {
    Pair read[kBatch / 2];
#pragma unroll
    for (int i = 0; i < kBatch; i += 2) {
      int const half = i / 2 % 2, offset = (start + i) / 4 * 8;
      // Rows are a multiple of 16 bytes: both columns of a pair are inside, or both outside.
      read[i / 2].clear();
      if (inside[half] && offset < columns) {
        read[i / 2] = *reinterpret_cast<Pair const*>(halves[half] + offset);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      accumulators(start + i) += beta * float(read[i / 2][i % 2]);
    }
  }
}

// Adds `value` to the elements of a half tile that are on the diagonal of the matrix, `below` rows
// below the half tile's first element.
template <class Accumulators>
__device__ void add_on_diagonal(Accumulators& accumulators, float value, int below) {
  constexpr int kCount = decltype(cute::size(accumulators))::value;
  // The place of an accumulator relative to the thread's first one does not depend on the thread.
  int const place = accumulator_row(0) - accumulator_column(0) + below;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (place == i / 4 * 8 + i % 2 - i / 2 % 2 * 8) accumulators(i) += value;
  }
}

}  // namespace jgg::sm90
