// Grids of kernels that have a thread block for each tile of many matrices.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jgg {

// A grid with a thread block for each tile of some matrices, or for several adjacent tiles. All
// thread blocks are in the x dimension of the grid, because the y and z dimensions end at 65535.
struct TileGrid {
  unsigned across;
  unsigned down;

  struct Place {
    int matrix;
    int down;
    int across;
  };

  // Returns the size of the grid. If it is more than a grid can have, the launch returns an error.
  dim3 blocks(int64_t matrices = 1) const {
    return dim3(static_cast<unsigned>(std::min<int64_t>(matrices * down * across, UINT32_MAX)));
  }

  // Returns the place of a thread block, by default that of the calling block.
  __device__ __forceinline__ Place place(unsigned number = blockIdx.x) const {
    unsigned const row = number / across, matrix = row / down;
    return {static_cast<int>(matrix), static_cast<int>(row - matrix * down),
            static_cast<int>(number - row * across)};
  }
};

}  // namespace jgg
