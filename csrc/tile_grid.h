// Grids of kernels that have a thread block for each tile of many matrices.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jgg {

// The tiles of matrices, a thread block each, or for some that are next to each other. All of them
// are in the first dimension of the grid: the others end at 65535.
struct TileGrid {
  unsigned across;
  unsigned down;

  struct Place {
    int matrix;
    int down;
    int across;
  };

  // Where there are more than a grid has, the launch says so.
  dim3 blocks(int64_t matrices = 1) const {
    return dim3(static_cast<unsigned>(std::min<int64_t>(matrices * down * across, UINT32_MAX)));
  }

  // The place of a thread block, this one by default.
  __device__ __forceinline__ Place place(unsigned number = blockIdx.x) const {
    unsigned const row = number / across, matrix = row / down;
    return {static_cast<int>(matrix), static_cast<int>(row - matrix * down),
            static_cast<int>(number - row * across)};
  }
};

}  // namespace jgg
