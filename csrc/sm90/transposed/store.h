// The result of a transposed tile, straight from registers to memory.
#pragma once

#include <cstdint>

#include "scheduler/warp.h"
#include "sm90/kernel_config.h"

namespace jgg::sm90::transposed {

// Where a consumer's slice goes: its first element in an array of `pitch` elements a row, and how
// many of its rows and columns are stored.
template <class Output>
struct Target {
  Output* data;
  int pitch;
  int rows;
  int columns;
};

// Stores a slice of 64 columns, each times `scale(column)`. WGMMA leaves thread t of a warp with
// rows 2 (t % 4) and the next of columns t / 4 and t / 4 + 8 of each 8 rows, and each warp with 16
// columns.
template <class Output, class Scale, int kValues>
__device__ void store(float const (&values)[kValues], Target<Output> const& to, Scale scale) {
  constexpr int kWarpColumns = 16;
  int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const column = warp * kWarpColumns + half * 8 + lane / 4;
    if (column >= to.columns) return;
    float const factor = scale(column);
    Output* const data = to.data + column;
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      int const row = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (row < to.rows) {
        data[int64_t(row) * to.pitch] = Output(values[i / 2 * 4 + half * 2 + i % 2] * factor);
      }
    }
  }
}

}  // namespace jgg::sm90::transposed
