// A tile of 128 x 128 elements in the registers of 512 threads, and its transposition.
//
// Each thread holds a patch of 4 x 8. The rows of a patch are consecutive, so that the FP8
// conversion of a column is already a piece of the transpose. The columns are consecutive, so that
// loads are 16 bytes wide.
#pragma once

#include <cuda_pipeline.h>

#include "quantize/octet.h"
#include "quantize/scale_rule.h"

namespace jgg::quantize {

constexpr int kTileThreads = 512;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kPatchRows = 4;
constexpr int kPatchesDown = kScaleBlock / kPatchRows;  // of a tile
constexpr int kPatchesAcross = kScaleBlock / kOctet;

struct PatchPosition {
  int row;  // of the patch's first element, in the tile
  int column;

  __device__ __forceinline__ PatchPosition()
      : row(threadIdx.x / kPatchesAcross * kPatchRows),
        column(threadIdx.x % kPatchesAcross * kOctet) {}
};

// Returns the first row of this warp's patches.
__device__ __forceinline__ int first_row_of_warp() {
  return threadIdx.x / 32 * (32 / kPatchesAcross * kPatchRows);
}

// How many rows and columns the matrix has from the tile's first element on.
struct TileExtent {
  int rows;
  int columns;
};

template <class Source>
struct Patch {
  Octet<Source> row[kPatchRows];

  template <bool kAligned>
  __device__ __forceinline__ static Patch load(Source const* tile, int pitch, TileExtent extent) {
    PatchPosition const at;
    Patch patch;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      int const row = at.row + i;
      int const count = row < extent.rows ? extent.columns - at.column : 0;
      Source const* from = tile + static_cast<int64_t>(row) * pitch + at.column;
      patch.row[i] = Octet<Source>::template load<kAligned>(from, count);
    }
    return patch;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& octet : row) {
#pragma unroll
      for (uint32_t& w : octet.word) w = 0;
    }
  }

  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (auto& octet : row) octet.stay_packed();
  }

  // Writes row i of the patch times inverse(i).
  template <ElementType kFormat, bool kAligned, class Inverse>
  __device__ __forceinline__ void store_rows(uint8_t* tile, int pitch, TileExtent extent,
                                             Inverse inverse) const {
    PatchPosition const at;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      float const factor = inverse(i);
      auto const scaled = [&](int j) { return row[i][j] * factor; };
      int const count = at.row + i < extent.rows ? extent.columns - at.column : 0;
      store_bytes<kAligned>(tile + static_cast<int64_t>(at.row + i) * pitch + at.column,
                            convert_eight<kFormat>(scaled), count);
    }
  }
};

// A buffer for the patches of a tile that is needed later. Each thread reads only what it copied
// itself, so no barrier is needed.
template <class Source>
struct Staging {
  static constexpr int kPieces = Octet<Source>::kWords / 4;
  uint4 piece[kPatchRows][kPieces][kTileThreads];

  __device__ __forceinline__ void fetch(Source const* tile, int pitch, TileExtent extent) {
    PatchPosition const at;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      int const row = at.row + i;
      bool const exists = row < extent.rows && at.column < extent.columns;
      Source const* from = tile + static_cast<int64_t>(row) * pitch + at.column;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        __pipeline_memcpy_async(&piece[i][j][threadIdx.x],
                                exists ? reinterpret_cast<uint4 const*>(from) + j : nullptr,
                                sizeof(uint4), exists ? 0 : sizeof(uint4));
      }
    }
  }

  __device__ __forceinline__ Octet<Source> row(int i) const {
    Octet<Source> octet;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      uint4 const words = piece[i][j][threadIdx.x];
      auto& to = octet.word;
      to[4 * j] = words.x, to[4 * j + 1] = words.y;
      to[4 * j + 2] = words.z, to[4 * j + 3] = words.w;
    }
    return octet;
  }

  __device__ __forceinline__ Patch<Source> take() const {
    Patch<Source> patch;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) patch.row[i] = row(i);
    return patch;
  }
};

// The FP8 transpose of a tile in shared memory, which threads write in columns of patches and read
// in whole rows of 128 bytes.
//
// Piece p of a row, of 4 bytes, is at p ^ (2 * (row / 8)). The 32 threads of a warp write a piece
// each, two in every eighth row, and therefore reach all banks.
struct TransposeBuffer {
  uint32_t piece[kScaleBlock][kPatchesDown];

  // Writes column j of the patch times inverse(j) as a piece of the column's row. All threads call
  // it.
  template <ElementType kFormat, class Source, class Inverse>
  __device__ __forceinline__ void put(Patch<Source> const& patch, Inverse inverse) {
    PatchPosition const at;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      float const factor = inverse(j);
      auto const scaled = [&](int i) { return patch.row[i][j] * factor; };
      *place(at, j) = convert_four<kFormat>(scaled);
    }
  }

  // Writes a patch of zeros.
  __device__ __forceinline__ void clear() {
    PatchPosition const at;
    for (int j = 0; j < kOctet; ++j) *place(at, j) = 0;
  }

  // Stores the transposed tile, whose extent is `extent`. Call it after a barrier.
  template <bool kAligned>
  __device__ __forceinline__ void store(uint8_t* tile, int64_t pitch, TileExtent extent) const {
    constexpr int kThreadsPerRow = kScaleBlock / sizeof(uint4);
    int const quad = threadIdx.x % kThreadsPerRow;
#pragma unroll
    for (int row = threadIdx.x / kThreadsPerRow; row < kScaleBlock;
         row += kTileThreads / kThreadsPerRow) {
      // Exclusive or moves the four pieces of a quad together, and exchanges its halves if the row
      // of patches is odd.
      int const patch = row / kOctet;
      uint4 pieces = *reinterpret_cast<uint4 const*>(&piece[row][(4 * quad) ^ (2 * (patch & ~1))]);
      if (patch % 2) pieces = {pieces.z, pieces.w, pieces.x, pieces.y};
      int const column = quad * static_cast<int>(sizeof(uint4));
      store_bytes<kAligned>(tile + row * pitch + column, pieces,
                            row < extent.rows ? extent.columns - column : 0);
    }
  }

 private:
  __device__ __forceinline__ uint32_t* place(PatchPosition at, int j) {
    return &piece[at.column + j][(at.row / kPatchRows) ^ (2 * (at.column / kOctet))];
  }
};

}  // namespace jgg::quantize
