// Finds blocks of 128 rows of one group, and computes the scales of their tiles along the columns
// and along the rows.
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
  int rows;      // how many of its rows exist, 0 past the last block
  bool grouped;  // whether a group owns them
};

// Returns block number `block`, where the blocks of all groups are numbered one after the other.
// All threads of the warp call it.
__device__ inline RowBlock find_block(int const* group_sizes, int num_groups, int rows, int block) {
  GroupSizes const groups{group_sizes, &kNoOffset, 0, 0, 1, num_groups, num_groups, rows};
  SegmentCursor<DeviceWarp, BlocksOfRows> cursor(groups, BlocksOfRows{});
  Segment segment;
  if (!cursor.seek(block, segment)) return {0, 0, false};
  int const before = (block - segment.first_unit) * kScaleBlock;
  return {segment.begin + before, min(segment.extent - before, kScaleBlock),
          segment.local_group < num_groups};
}

// The largest magnitudes of a patch's rows. A word holds the magnitudes of two rows if elements
// have 16 bits, so that the warp reduces two rows at a time.
template <class Source>
struct LargestOfRows {
  static constexpr int kRowsPerWord = Word<Source>::kElements;
  uint32_t word[kPatchRows / kRowsPerWord];

  // Sets the largest magnitude of row i, which all elements of `of_octet` hold. Call it for rows in
  // ascending order.
  __device__ __forceinline__ void set(int i, uint32_t of_octet) {
    auto& to = word[i / kRowsPerWord];
    to = i % kRowsPerWord == 0 ? of_octet : __byte_perm(to, of_octet, 0x5410);
  }

  // Returns the largest magnitude of row threadIdx.x % kPatchRows. All 16 threads that share the
  // rows call it.
  __device__ __forceinline__ float reduce() const {
    float largest = 0;
    int const mine = threadIdx.x % kPatchRows;
#pragma unroll
    for (int i = 0; i < kPatchRows; i += kRowsPerWord) {
      uint32_t const reduced = Word<Source>::max_over(word[i / kRowsPerWord], kPatchesAcross);
#pragma unroll
      for (int e = 0; e < kRowsPerWord; ++e) {
        if (mine == i + e) largest = Word<Source>::element(reduced, e);
      }
    }
    return largest;
  }
};

// Computes the scales of a patch's rows, one row in each thread. Stores the scales of the first
// `rows` rows of the tile, and returns the inverses.
template <ElementType kFormat, class Source>
__device__ __forceinline__ std::array<float, kPatchRows> scale_rows(
    LargestOfRows<Source> const& of_rows, float* scale, int pitch, int rows, bool power_of_two) {
  int const lane = threadIdx.x % kPatchesAcross;
  Scale const s = scale_of<kFormat>(of_rows.reduce(), power_of_two);
  int const row = PatchPosition().row + lane % kPatchRows;
  if (lane < kPatchRows && row < rows) scale[row * static_cast<int64_t>(pitch)] = s.scale;
  std::array<float, kPatchRows> inverse;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    inverse[i] = __shfl_sync(~0u, s.inverse, i, kPatchesAcross);
  }
  return inverse;
}

// The maxima and scales of a tile's columns in shared memory, where its warps exchange them.
template <class Source>
struct ColumnScales {
  static constexpr int kWords = kScaleBlock / Word<Source>::kElements;
  uint32_t warp_largest[kTileWarps][kWords];  // of each column, over a warp's rows
  float inverse[kScaleBlock];                 // of the columns' scales

  // Stores the largest magnitude of each column over the rows of a warp. `of_patch` has the largest
  // magnitudes over a thread's patch.
  __device__ __forceinline__ void reduce(Octet<Source> const& of_patch) {
    constexpr int kOctetWords = Octet<Source>::kWords;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int w = 0; w < kOctetWords; ++w) {
      uint32_t const largest = Word<Source>::max_over(of_patch.word[w], 32, kPatchesAcross);
      if (lane < kPatchesAcross) warp_largest[warp][lane * kOctetWords + w] = largest;
    }
  }
  __device__ __forceinline__ void reduce(Patch<Source> const& patch) {
    Octet<Source> largest{};
#pragma unroll
    for (auto const& octet : patch.row) largest.raise(octet);
    reduce(largest);
  }

  // Clears the maxima of a warp without rows.
  __device__ __forceinline__ void clear() {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int word = lane; word < kWords; word += 32) warp_largest[warp][word] = 0;
  }

  // Returns the largest magnitude of a column. Call it after a barrier.
  __device__ __forceinline__ float largest(int column) const {
    using Words = Word<Source>;
    uint32_t result = 0;
#pragma unroll
    for (auto const& of_warp : warp_largest) {
      result = Words::max(result, of_warp[column / Words::kElements]);
    }
    return Words::element(result, column);
  }

  // Computes the scale of a column, which is 1 if rows are not `counted`, and stores it if the
  // column exists. One thread for each column calls it, after a barrier. All threads may read
  // `inverse` after the next barrier.
  template <ElementType kFormat>
  __device__ __forceinline__ void scale(int column, float* scale, int columns, bool counted,
                                        bool power_of_two) {
    Scale const s = scale_of<kFormat>(counted ? largest(column) : 0.0f, power_of_two);
    inverse[column] = s.inverse;
    if (column < columns) scale[column] = s.scale;
  }
};

// Writes zeros to a block without rows, and 1 to its scales unless `scale_t` is null.
__device__ inline void clear_columns(uint8_t* q_t, float* scale_t, int columns) {
  auto* const pieces = reinterpret_cast<uint4*>(q_t);
  int const count = columns * (kScaleBlock / static_cast<int>(sizeof(uint4)));
  for (int piece = threadIdx.x; piece < count; piece += kTileThreads) pieces[piece] = {};
  if (scale_t == nullptr) return;
  for (int column = threadIdx.x; column < columns; column += kTileThreads) scale_t[column] = 1;
}

}  // namespace jgg::quantize
