// A tile of 256 x 256 elements of 16 bits in the registers of 1024 threads, and its transposition.
// Each thread holds a patch of 8 x 8. The results have rows of 256 bytes, which memory takes faster
// than the rows of 128 bytes of smaller tiles.
#pragma once

#include <cuda_pipeline.h>

#include "quantize/octet.h"
#include "quantize/scale_rule.h"

namespace jgg::quantize {

constexpr int kWideTile = 256;
constexpr int kWidePatches = kWideTile / kOctet;  // of a row or column; a warp has a row
constexpr int kWideThreads = kWidePatches * kWidePatches;
constexpr int kWideWarps = kWideThreads / 32;
static_assert(kWidePatches == 32);

struct WidePosition {
  int row;  // of the patch's first element, in the tile
  int column;

  __device__ __forceinline__ WidePosition()
      : row(threadIdx.x / kWidePatches * kOctet), column(threadIdx.x % kWidePatches * kOctet) {}
};

template <class Source>
struct WidePatch {
  static_assert(sizeof(Source) == 2, "wider elements take too many registers");
  Octet<Source> row[kOctet];

  // Replaces infinities by NaN, and returns a word whose elements all are the largest magnitude.
  __device__ __forceinline__ uint32_t largest_after_poisoning() {
    uint32_t largest = 0;
#pragma unroll
    for (auto& octet : row) {
      largest = Word<Source>::max(largest, octet.largest_after_poisoning());
    }
    return largest;
  }

  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (auto& octet : row) octet.stay_packed();
  }

  // Writes the patch times `factor`. `to` is the address of its first element.
  template <ElementType kFormat>
  __device__ __forceinline__ void store_rows(uint8_t* to, int pitch, float factor) const {
#pragma unroll
    for (auto const& octet : row) {
      *reinterpret_cast<uint2*>(to) =
          convert_eight<kFormat>([&](int j) { return octet[j] * factor; });
      to += pitch;
    }
  }
};

// A buffer for the patches of the next tile. Each thread reads only what it copied itself, so no
// barrier is needed.
struct WideStaging {
  uint4 piece[kOctet][kWideThreads];

  // `from` is the address of the patch's first element.
  template <class Source>
  __device__ __forceinline__ void fetch(Source const* from, int pitch) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      __pipeline_memcpy_async(&piece[i][threadIdx.x], from, sizeof(uint4));
      from += pitch;
    }
    __pipeline_commit();
  }

  template <class Source>
  __device__ __forceinline__ WidePatch<Source> take() const {
    __pipeline_wait_prior(0);
    WidePatch<Source> patch;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      uint4 const words = piece[i][threadIdx.x];
      auto& to = patch.row[i].word;
      to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    }
    return patch;
  }
};

// The FP8 transpose of a tile in shared memory, which threads write in columns of patches and read
// in whole rows of 256 bytes.
//
// Piece p of a row, of 8 bytes, is at p ^ (row / 8). The 32 threads of a warp write a piece each,
// in every eighth row, and therefore reach all banks.
struct WideTranspose {
  uint2 piece[kWideTile][kWidePatches];

  // Writes the patch times `factor`. All threads call it.
  template <ElementType kFormat, class Source>
  __device__ __forceinline__ void put(WidePatch<Source> const& patch, float factor) {
    WidePosition const at;
    int const place = (at.row / kOctet) ^ (at.column / kOctet);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      piece[at.column + j][place] =
          convert_eight<kFormat>([&](int i) { return patch.row[i][j] * factor; });
    }
  }

  // Stores the transposed tile. Call it after a barrier.
  __device__ __forceinline__ void store(uint8_t* tile, int64_t pitch) const {
    constexpr int kThreadsPerRow = kWideTile / sizeof(uint4);
    int const pair = threadIdx.x % kThreadsPerRow;
#pragma unroll
    for (int row = threadIdx.x / kThreadsPerRow; row < kWideTile;
         row += kWideThreads / kThreadsPerRow) {
      // Exclusive or moves the two pieces of a pair together, and exchanges them if the row of
      // patches is odd.
      int const patch = row / kOctet;
      uint4 pieces = *reinterpret_cast<uint4 const*>(&piece[row][(2 * pair) ^ (patch & ~1)]);
      if (patch % 2) pieces = {pieces.z, pieces.w, pieces.x, pieces.y};
      int const column = pair * static_cast<int>(sizeof(uint4));
      *reinterpret_cast<uint4*>(tile + row * pitch + column) = pieces;
    }
  }
};

}  // namespace jgg::quantize
