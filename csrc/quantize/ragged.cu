// Quantises the rows of a ragged product for all that training does with them, in one read: scaled
// along the columns for the forward product or the cotangent of lhs, and transposed and scaled
// along the rows for the cotangent of the weights.
//
// That one contracts rows, 128 in a step, so the transpose is made of blocks of 128 rows of one
// group, filled up with zeros. Only the device knows the groups: a CTA looks up the rows of its
// block itself.
#include <algorithm>
#include <array>

#include "quantize/format.h"
#include "quantize/tile.h"
#include "scheduler/segment_cursor.h"

namespace jgg::quantize {
namespace {

constexpr int kTilesPerCta = 4;  // side by side, in a large matrix with few groups
constexpr int kLeastCtas = 640;  // two turns and more for every processor

// Two keep the memory busy while one of them computes, if a tile leaves the registers for it.
template <class Source, bool kAligned>
constexpr int kCtasPerProcessor = sizeof(Source) == 2 && kAligned ? 2 : 1;

__device__ int const kNoOffset = 0;

// Warps with and without rows meet at different places of the program.
constexpr int kTileBarrier = 0;

struct BlocksOfRows {
  JGG_HOST_DEVICE int operator()(int, int begin, int end) const {
    return (end - begin + kScaleBlock - 1) / kScaleBlock;
  }
};

struct RowBlock {
  int first;     // its first row in x
  int rows;      // how many of its rows are there, 0 past the last
  bool grouped;  // whether a group owns them
};

__device__ RowBlock find_block(RaggedArguments const& arguments, int batch, int block) {
  int const stride = arguments.group_sizes_batched ? arguments.groups : 0;
  GroupSizes const groups{arguments.group_sizes + static_cast<int64_t>(batch) * stride,
                          &kNoOffset,
                          0,
                          0,
                          1,
                          arguments.groups,
                          arguments.groups,
                          arguments.rows};
  SegmentCursor<DeviceWarp, BlocksOfRows> cursor(groups, BlocksOfRows{});
  Segment segment;
  if (!cursor.seek(block, segment)) return {0, 0, false};
  int const before = (block - segment.first_unit) * kScaleBlock;
  return {segment.begin + before, min(segment.extent - before, kScaleBlock),
          segment.local_group < arguments.groups};
}

template <class Source>
struct SharedStorage {
  static constexpr int kWords = kScaleBlock / Word<Source>::kElements;
  TransposeBuffer transpose;
  uint32_t warp_largest[kTileWarps][kWords];  // of each column, over a warp's rows
  float inverse[kScaleBlock];                 // of the columns' scales
  Staging<Source> stagings[2];
};

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

// The largest of each column over the rows of a warp, to shared memory; zeros if not `counted`.
template <class Source>
__device__ __forceinline__ void reduce_columns(Patch<Source> const& patch,
                                               SharedStorage<Source>& shared, bool counted) {
  using Words = Word<Source>;
  constexpr int kWords = Octet<Source>::kWords;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    uint32_t largest = 0;
#pragma unroll
    for (auto const& octet : patch.row) {
      largest = Words::max(largest, Words::magnitude(octet.word[w]));
    }
    largest = Words::max_over(largest, 32, kPatchesAcross);
    if (lane < kPatchesAcross) {
      shared.warp_largest[warp][lane * kWords + w] = counted ? largest : 0;
    }
  }
}

// For a warp that has no rows in any of its block's tiles: its part of what all warps write.
template <class Source>
__device__ __forceinline__ void clear_rows(SharedStorage<Source>& shared) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int word = lane; word < SharedStorage<Source>::kWords; word += 32) {
    shared.warp_largest[warp][word] = 0;
  }
  shared.transpose.clear();
}

// After a barrier, the scales of the columns. Stores those of the `columns` columns that are there;
// their inverses are in shared memory after the next barrier.
template <ElementType kFormat, class Source>
__device__ __forceinline__ void scale_columns(SharedStorage<Source>& shared, float* scale,
                                              int columns, bool power_of_two) {
  using Words = Word<Source>;
  int const column = threadIdx.x;
  if (column < kScaleBlock) {
    uint32_t largest = 0;
#pragma unroll
    for (auto const& of_warp : shared.warp_largest) {
      largest = Words::max(largest, of_warp[column / Words::kElements]);
    }
    Scale const s = scale_of<kFormat>(Words::element(largest, column), power_of_two);
    shared.inverse[column] = s.inverse;
    if (column < columns) scale[column] = s.scale;
  }
}

// Tiles side by side, one after the other; the next is on its way while one is quantised.
template <class Source, bool kAligned>
class TileLoader {
 public:
  using Stagings = Staging<Source>[2];

  __device__ __forceinline__ TileLoader(Stagings& stagings, Source const* rows, int pitch,
                                        int num_rows, int first_column, int end_column)
      : stagings_(stagings),
        rows_(rows),
        pitch_(pitch),
        num_rows_(num_rows),
        column_(first_column),
        end_(end_column) {
    fetch();
  }

  __device__ __forceinline__ Patch<Source> next() {
    if constexpr (kAligned) {
      fetch();
      __pipeline_wait_prior(1);
      return stagings_[turn_].take();
    } else {
      Source const* tile = rows_ + column_;
      TileExtent const extent{num_rows_, end_ - column_};
      column_ += kScaleBlock;
      return Patch<Source>::template load<false>(tile, pitch_, extent);
    }
  }

 private:
  // Into the staging whose tile was taken last.
  __device__ __forceinline__ void fetch() {
    if constexpr (kAligned) {
      stagings_[turn_].fetch(rows_ + column_, pitch_, {num_rows_, end_ - column_});
      __pipeline_commit();
      column_ += kScaleBlock;
      turn_ ^= 1;
    }
  }

  Stagings& stagings_;
  Source const* rows_;
  int pitch_;
  int num_rows_;
  int column_;  // of the tile to fetch next
  int end_;
  int turn_ = 0;
};

// Of a block without a row in x: zeros, with scales of one.
__device__ void clear_columns(uint8_t* q_t, float* scale_t, int columns) {
  auto* const pieces = reinterpret_cast<uint4*>(q_t);
  int const count = columns * (kScaleBlock / static_cast<int>(sizeof(uint4)));
  for (int piece = threadIdx.x; piece < count; piece += kTileThreads) pieces[piece] = {};
  for (int column = threadIdx.x; column < columns; column += kTileThreads) scale_t[column] = 1;
}

template <class Source, ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kTileThreads, kCtasPerProcessor<Source, kAligned>)
    quantize_ragged_kernel(RaggedArguments arguments, int tiles_per_cta, bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Source>*>(shared_bytes);
  int const batch = blockIdx.z, rows = arguments.rows;
  int pitch = arguments.columns;
  RowBlock const block = find_block(arguments, batch, blockIdx.y);
  int column = blockIdx.x * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, pitch);

  int64_t const block_t = static_cast<int64_t>(batch) * gridDim.y + blockIdx.y;
  auto const q_t_at = [&](int column) {
    return arguments.q_t + (block_t * pitch + column) * kScaleBlock;
  };
  auto const scale_t_at = [&](int column) { return arguments.scale_t + block_t * pitch + column; };
  if (block.rows == 0) {
    if (arguments.q_t) clear_columns(q_t_at(column), scale_t_at(column), end - column);
    return;
  }

  if (first_row_of_warp() >= block.rows) {
    if (arguments.q_t) {
      clear_rows(shared);
      for (; column < end; column += kScaleBlock) {
        __barrier_sync(kTileBarrier);
        scale_columns<kFormat>(shared, scale_t_at(column), pitch - column, power_of_two);
        __barrier_sync(kTileBarrier);
        __barrier_sync(kTileBarrier);
        shared.transpose.template store<true>(q_t_at(column), kScaleBlock,
                                              {pitch - column, kScaleBlock});
      }
    }
    return;
  }

  auto const first_row_of = [&](int batch) {
    return static_cast<int64_t>(batch) * rows + block.first;
  };
  TileLoader<Source, kAligned> loader(shared.stagings,
                                      static_cast<Source const*>(arguments.x) +
                                          first_row_of(arguments.x_batched ? batch : 0) * pitch,
                                      pitch, block.rows, column, end);
#pragma unroll 1
  for (; column < end; column += kScaleBlock) {
    // Otherwise the compiler keeps the addresses of all rows of all arrays for the next tile.
    asm volatile("" : "+r"(pitch));
    Patch<Source> patch = loader.next();
    std::array<uint32_t, kPatchRows> largest;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) largest[i] = patch.row[i].largest_after_poisoning();
    patch.stay_packed();
    if (arguments.q_t) {
      reduce_columns(patch, shared, block.grouped);
      __barrier_sync(kTileBarrier);
      scale_columns<kFormat>(shared, scale_t_at(column), pitch - column, power_of_two);
    }
    if (arguments.q) {
      int64_t const first_row = first_row_of(batch);
      int const blocks_per_row = (pitch + kScaleBlock - 1) / kScaleBlock;
      auto const inverse = scale_rows<kFormat, Source>(
          largest, arguments.scale + first_row * blocks_per_row + column / kScaleBlock,
          blocks_per_row, block.rows, power_of_two);
      patch.template store_rows<kFormat, kAligned>(arguments.q + first_row * pitch + column, pitch,
                                                   {block.rows, pitch - column},
                                                   [&](int i) { return inverse[i]; });
      patch.stay_packed();
    }
    if (arguments.q_t) {
      if (!block.grouped) patch.clear();
      __barrier_sync(kTileBarrier);
      shared.transpose.template put<kFormat>(
          patch, [&](int j) { return shared.inverse[PatchPosition().column + j]; });
      __barrier_sync(kTileBarrier);
      shared.transpose.template store<true>(q_t_at(column), kScaleBlock,
                                            {pitch - column, kScaleBlock});
    }
  }
}

}  // namespace

cudaError_t quantize_ragged(QuantizeFormat format, RaggedArguments const& arguments,
                            cudaStream_t stream) {
  int const tiles = blocks_of(arguments.columns), row_blocks = arguments.row_blocks;
  // Tiles share a look-up, which steps over 32 groups at a time, and a start, as long as every
  // processor gets several turns.
  int64_t const all_tiles = static_cast<int64_t>(tiles) * row_blocks * arguments.batches;
  int const most = std::max(kTilesPerCta, arguments.groups / kWarpSize);
  int const tiles_per_cta = static_cast<int>(std::clamp<int64_t>(all_tiles / kLeastCtas, 1, most));
  dim3 const grid((tiles + tiles_per_cta - 1) / tiles_per_cta, row_blocks, arguments.batches);
  bool const is_aligned = arguments.columns % kOctet == 0;
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    using Source = SourceOf<source>;
    constexpr int kSharedBytes = sizeof(SharedStorage<Source>);
    auto const kernel = quantize_ragged_kernel<Source, fp8.value, aligned.value>;
    cudaError_t const status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(arguments, tiles_per_cta,
                                                         format.power_of_two);
    return cudaGetLastError();
  });
}

}  // namespace jgg::quantize
