// The epilogue of tiles to which nothing is added: stores accumulators directly from registers.
#pragma once

#include "fp64/mainloop.h"

namespace jgg::fp64 {

// Two neighbouring elements of a row. One instruction stores both if they are 16 bytes.
template <class Element>
struct alignas(16) Pair {
  Element left;
  Element right;
};

// Stores scale * accumulators in the tile at `out`. From there on, the result has `rows` rows and
// `columns` columns, and its rows are `pitch` elements apart. The pairs of four lanes are
// contiguous and fill whole sectors of memory.
template <class Config>
__device__ void store_directly(Accumulators<Config>& accumulators,
                               Value<typename Config::Element> scale, typename Config::Element* out,
                               int rows, int columns, int pitch) {
  using Element = typename Config::Element;
  using Sum = Value<Element>;
  // With an even pitch, all rows begin at a multiple of 16 bytes.
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
