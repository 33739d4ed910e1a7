// The epilogue of tiles to which nothing is added: stores accumulators directly from registers.
#pragma once

#include "fp64/mainloop.h"

namespace jgg::fp64 {

// Stored at once if that is 16 bytes.
template <class Element>
struct alignas(16) Pair {
  Element left;
  Element right;
};

// out = scale * accumulators, for a tile at `out` with so many rows and columns in the result.
// `pitch` is the distance of rows of the result. The pairs of four lanes are contiguous, enough for
// whole sectors of memory.
template <class Config>
__device__ void store_directly(Accumulators<Config>& accumulators,
                               Value<typename Config::Element> scale, typename Config::Element* out,
                               int rows, int columns, int pitch) {
  using Element = typename Config::Element;
  using Sum = Value<Element>;
  // All rows begin at a multiple of 16 bytes.
  bool const as_one = pitch % 2 == 0;
  accumulators.for_each_pair([&](int row, int column, Sum left, Sum right) {
    if (row >= rows || column >= columns) return;
    Pair<Element> const pair{narrow<Element>(times(scale, left)),
                             narrow<Element>(times(scale, right))};
    Element* const to = out + int64_t(row) * pitch + column;
    if (as_one) {
      *reinterpret_cast<Pair<Element>*>(to) = pair;
    } else {
      to[0] = pair.left;
      if (column + 1 < columns) to[1] = pair.right;
    }
  });
}

}  // namespace jgg::fp64
