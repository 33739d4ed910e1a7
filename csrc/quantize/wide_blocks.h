// Quantises weights of 16 bits whose matrices consist of whole tiles of 256 x 256. A tile has four
// blocks, and each block has one scale. The kernel is persistent: there is a thread block for each
// multiprocessor, which loads its next tile while it quantises one.
#pragma once

#include <algorithm>

#include "multiprocessors.h"
#include "quantize/quantize.h"
#include "quantize/wide_tile.h"

namespace jgg::quantize {

struct WideShared {
  WideStaging staging;
  WideTranspose transpose;
  uint32_t warp_largest[kWideWarps][2];  // of the left and the right half of a warp's rows
};

inline int64_t wide_tiles(BlocksArguments const& arguments) {
  return int64_t{1} * arguments.matrices * (arguments.rows / kWideTile) *
         (arguments.columns / kWideTile);
}

// Two tiles for each of 132 multiprocessors. With fewer tiles, many multiprocessors would be idle.
constexpr int kLeastWideTiles = 264;

inline bool suits_wide_tiles(BlocksArguments const& arguments) {
  return arguments.rows % kWideTile == 0 && arguments.columns % kWideTile == 0 &&
         wide_tiles(arguments) >= kLeastWideTiles;
}

// The place of a tile's first element.
struct WidePlace {
  int64_t matrix;
  int row;
  int column;

  __device__ __forceinline__ WidePlace(int tile, BlocksArguments const& arguments) {
    int const across = arguments.columns / kWideTile, down = arguments.rows / kWideTile;
    int const row_of_tiles = tile / across;
    column = (tile - row_of_tiles * across) * kWideTile;
    matrix = row_of_tiles / down;
    row = (row_of_tiles - static_cast<int>(matrix) * down) * kWideTile;
  }
};

template <class Source, ElementType kFormat>
__global__ void __launch_bounds__(kWideThreads, 1)
    quantize_wide_blocks_kernel(BlocksArguments arguments, int tiles, bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<WideShared*>(shared_bytes);
  using Words = Word<Source>;
  int const rows = arguments.rows, columns = arguments.columns;
  WidePosition const at;
  int const pitch = quantize::pitch(arguments);
  auto const offset_of = [&](WidePlace const& tile, int pitch) {
    return (tile.matrix * rows + tile.row + at.row) * pitch + tile.column + at.column;
  };
  auto const fetch = [&](int tile) {
    if (tile >= tiles) return;
    shared.staging.fetch(
        static_cast<Source const*>(arguments.x) + offset_of(WidePlace(tile, arguments), columns),
        columns);
  };

  fetch(blockIdx.x);
#pragma unroll 1
  for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
    auto patch = shared.staging.take<Source>();
    fetch(number + gridDim.x);
    // The patches of a block are in half of the lanes of half of the warps.
    constexpr int kHalf = kWideWarps / 2;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t largest = Words::max_over(patch.largest_after_poisoning(), kHalf);
    patch.stay_packed();
    if (lane % kHalf == 0) shared.warp_largest[warp][lane / kHalf] = largest;
    __syncthreads();
    largest = shared.warp_largest[warp / kHalf * kHalf + lane % kHalf][lane / kHalf];
    largest = Words::max_over(largest, kHalf);

    Scale const s = scale_of<kFormat>(Words::element(largest, 0), power_of_two);
    WidePlace const tile(number, arguments);
    int const blocks_down = rows / kScaleBlock, blocks_across = pitch / kScaleBlock;
    int const block_row = (tile.row + at.row) / kScaleBlock;
    int const block_column = (tile.column + at.column) / kScaleBlock;
    bool const leads = at.row % kScaleBlock == 0 && at.column % kScaleBlock == 0;
    if (arguments.q) {
      patch.template store_rows<kFormat>(arguments.q + offset_of(tile, pitch), pitch, s.inverse);
      if (leads) {
        int64_t const row_of_blocks = tile.matrix * blocks_down + block_row;
        arguments.scale[row_of_blocks * blocks_across + block_column] = s.scale;
      }
    }
    patch.stay_packed();
    if (arguments.q_t) shared.transpose.put<kFormat>(patch, s.inverse);
    __syncthreads();
    if (arguments.q_t) {
      int64_t const first_row = tile.matrix * pitch + tile.column;
      shared.transpose.store(arguments.q_t + first_row * rows + tile.row, rows);
      if (leads) {
        int64_t const row_of_blocks = tile.matrix * blocks_across + block_column;
        arguments.scale_t[row_of_blocks * blocks_down + block_row] = s.scale;
      }
    }
  }
}

template <class Source, ElementType kFormat>
cudaError_t quantize_wide_blocks(BlocksArguments const& arguments, bool power_of_two,
                                 cudaStream_t stream) {
  int multiprocessors;
  cudaError_t status = count_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;
  constexpr int kSharedBytes = sizeof(WideShared);
  auto const kernel = quantize_wide_blocks_kernel<Source, kFormat>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  int64_t const tiles = wide_tiles(arguments);
  if (tiles > INT32_MAX / 2) return cudaErrorInvalidValue;
  int const grid = static_cast<int>(std::min<int64_t>(tiles, multiprocessors));
  kernel<<<grid, kWideThreads, kSharedBytes, stream>>>(arguments, static_cast<int>(tiles),
                                                       power_of_two);
  return cudaGetLastError();
}

}  // namespace jgg::quantize
