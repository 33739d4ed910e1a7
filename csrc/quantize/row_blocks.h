// Blocks of 128 rows of one group, and their tiles scaled along the columns and along the rows.
#pragma once

#include <array>

#include "quantize/tile.h"
#include "scheduler/segment_cursor.h"

namespace jgg::quantize {

static __device__ int const kNoOffset = 0;

struct BlocksOfRows {
  JGG_HOST_DEVICE int operator()(int, int begin, int end) const {
    return (end - begin + kScaleBlock - 1) / kScaleBlock;
  }
};

struct RowBlock {
  int first;     // its first row
  int rows;      // how many of its rows are there, 0 past the last
  bool grouped;  // whether a group owns them
};

// The block-th of all blocks of `rows` rows in groups. All threads of the warp call it.
__device__ inline RowBlock find_block(int const* group_sizes, int num_groups, int rows, int block) {
  GroupSizes const groups{group_sizes, &kNoOffset, 0, 0, 1, num_groups, num_groups, rows};
  SegmentCursor<DeviceWarp, BlocksOfRows> cursor(groups, BlocksOfRows{});
  Segment segment;
  if (!cursor.seek(block, segment)) return {0, 0, false};
  int const before = (block - segment.first_unit) * kScaleBlock;
  return {segment.begin + before, min(segment.extent - before, kScaleBlock),
          segment.local_group < num_groups};
}

// The scales of the patch's rows from the largest of each row's octet, with all 16 threads that
// share a row. Stores them, one a row, for the `rows` rows that are there; returns their inverses.
template <ElementType kFormat, class Source>
__device__ __forceinline__ std::array<float, kPatchRows> scale_rows(
    std::array<uint32_t, kPatchRows> const& of_octet, float* scale, int pitch, int rows,
    bool power_of_two) {
  static_assert(kPatchRows == 4);
  float largest = 0;
  int const lane = threadIdx.x % kPatchesAcross, mine = lane % kPatchRows;
  auto const take = [&](int row, uint32_t word, int element) {
    if (mine == row) largest = Word<Source>::element(word, element);
  };
  if constexpr (Word<Source>::kElements == 2) {
    // Two rows share a word on their way through the warp.
#pragma unroll
    for (int i = 0; i < kPatchRows; i += 2) {
      uint32_t const both = __byte_perm(of_octet[i], of_octet[i + 1], 0x5410);
      uint32_t const reduced = Word<Source>::max_over(both, kPatchesAcross);
      take(i, reduced, 0);
      take(i + 1, reduced, 1);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      take(i, Word<Source>::max_over(of_octet[i], kPatchesAcross), 0);
    }
  }
  // A thread works out the scale of one row and hands its inverse on.
  Scale const s = scale_of<kFormat>(largest, power_of_two);
  int const row = PatchPosition().row + mine;
  if (lane < kPatchRows && row < rows) scale[row * static_cast<int64_t>(pitch)] = s.scale;
  std::array<float, kPatchRows> inverse;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    inverse[i] = __shfl_sync(~0u, s.inverse, i, kPatchesAcross);
  }
  return inverse;
}

// What the warps of a tile tell each other about its columns.
template <class Source>
struct ColumnScales {
  static constexpr int kWords = kScaleBlock / Word<Source>::kElements;
  uint32_t warp_largest[kTileWarps][kWords];  // of each column, over a warp's rows
  float inverse[kScaleBlock];                 // of the columns' scales

  // The largest of each column over the rows of a warp; zeros if not `counted`.
  __device__ __forceinline__ void reduce(Patch<Source> const& patch, bool counted) {
    using Words = Word<Source>;
    constexpr int kOctetWords = Octet<Source>::kWords;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int w = 0; w < kOctetWords; ++w) {
      uint32_t largest = 0;
#pragma unroll
      for (auto const& octet : patch.row) {
        largest = Words::max(largest, Words::magnitude(octet.word[w]));
      }
      largest = Words::max_over(largest, 32, kPatchesAcross);
      if (lane < kPatchesAcross) {
        warp_largest[warp][lane * kOctetWords + w] = counted ? largest : 0;
      }
    }
  }

  // The same for a warp without rows.
  __device__ __forceinline__ void clear() {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int word = lane; word < kWords; word += 32) warp_largest[warp][word] = 0;
  }

  // After a barrier, the scale of one column, by one thread of each. Stores it, if the column is
  // there; its inverse is in shared memory after the next barrier.
  template <ElementType kFormat>
  __device__ __forceinline__ void scale(int column, float* scale, int columns, bool power_of_two) {
    using Words = Word<Source>;
    uint32_t largest = 0;
#pragma unroll
    for (auto const& of_warp : warp_largest) {
      largest = Words::max(largest, of_warp[column / Words::kElements]);
    }
    Scale const s = scale_of<kFormat>(Words::element(largest, column), power_of_two);
    inverse[column] = s.inverse;
    if (column < columns) scale[column] = s.scale;
  }
};

// Of a block without a row: zeros, with scales of one if there are any.
__device__ inline void clear_columns(uint8_t* q_t, float* scale_t, int columns) {
  auto* const pieces = reinterpret_cast<uint4*>(q_t);
  int const count = columns * (kScaleBlock / static_cast<int>(sizeof(uint4)));
  for (int piece = threadIdx.x; piece < count; piece += kTileThreads) pieces[piece] = {};
  if (scale_t == nullptr) return;
  for (int column = threadIdx.x; column < columns; column += kTileThreads) scale_t[column] = 1;
}

}  // namespace jgg::quantize
