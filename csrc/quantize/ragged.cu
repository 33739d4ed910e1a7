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
#include "quantize/row_blocks.h"

namespace jgg::quantize {
namespace {

constexpr int kTilesPerCta = 4;  // side by side, in a large matrix with few groups
constexpr int kLeastCtas = 640;  // two turns and more for every processor

// Two keep the memory busy while one of them computes, if a tile leaves the registers for it.
template <class Source, bool kAligned>
constexpr int kCtasPerProcessor = sizeof(Source) == 2 && kAligned ? 2 : 1;

// Warps with and without rows meet at different places of the program.
constexpr int kTileBarrier = 0;

template <class Source>
struct SharedStorage {
  TransposeBuffer transpose;
  ColumnScales<Source> columns;
  Staging<Source> stagings[2];
  int source_rows[kScaleBlock];  // of the block's rows, if they are elsewhere
};

// By the threads of the first warps, see `ColumnScales::scale`.
template <ElementType kFormat, class Source>
__device__ __forceinline__ void scale_columns(SharedStorage<Source>& shared, float* scale,
                                              int columns, bool power_of_two) {
  int const column = threadIdx.x;
  if (column < kScaleBlock) {
    shared.columns.template scale<kFormat>(column, scale, columns, power_of_two);
  }
}

// Rows that follow one another from the block's first on.
struct Consecutive {
  __device__ __forceinline__ int operator()(int row) const { return row; }
};

// Rows that are elsewhere in x.
struct Elsewhere {
  int const* source_rows;
  __device__ __forceinline__ int operator()(int row) const { return source_rows[row]; }
};

// Notes where the warp's own rows are.
template <class Source>
__device__ __forceinline__ void find_rows(RaggedArguments const& arguments, RowBlock const& block,
                                          SharedStorage<Source>& shared) {
  constexpr int kRowsPerWarp = 32 / kPatchesAcross * kPatchRows;
  int const lane = threadIdx.x % 32, row = first_row_of_warp() + lane;
  if (lane < kRowsPerWarp) {
    int const source = row < block.rows ? __ldg(arguments.source_rows + block.first + row) : -1;
    shared.source_rows[row] = source < arguments.source_count ? source : -1;
  }
  __syncwarp();
}

// Tiles side by side, one after the other; the next is on its way while one is quantised.
template <class Source, bool kAligned, class RowSource>
class TileLoader {
 public:
  using Stagings = Staging<Source>[2];

  __device__ __forceinline__ TileLoader(Stagings& stagings, Source const* rows, int pitch,
                                        int num_rows, int first_column, int end_column,
                                        RowSource const& source)
      : stagings_(stagings),
        rows_(rows),
        pitch_(pitch),
        num_rows_(num_rows),
        column_(first_column),
        end_(end_column),
        source_(source) {
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
      return Patch<Source>::template load<false>(tile, pitch_, extent, source_);
    }
  }

 private:
  // Into the staging whose tile was taken last.
  __device__ __forceinline__ void fetch() {
    if constexpr (kAligned) {
      stagings_[turn_].fetch(rows_ + column_, pitch_, {num_rows_, end_ - column_}, source_);
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
  RowSource source_;
  int turn_ = 0;
};

template <class Source, ElementType kFormat, bool kAligned, bool kGathers>
__global__ void __launch_bounds__(kTileThreads, kCtasPerProcessor<Source, kAligned>)
    quantize_ragged_kernel(RaggedArguments arguments, int tiles_per_cta, bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Source>*>(shared_bytes);
  int const batch = blockIdx.z, rows = arguments.rows;
  int pitch = arguments.columns;
  // Rows that are read many times stay in L2 where all of some columns are quantised before others.
  int const strip = kGathers ? blockIdx.y : blockIdx.x;
  int const block_index = kGathers ? blockIdx.x : blockIdx.y;
  int const* const group_sizes =
      arguments.group_sizes +
      static_cast<int64_t>(batch) * (arguments.group_sizes_batched ? arguments.groups : 0);
  RowBlock const block = find_block(group_sizes, arguments.groups, rows, block_index);
  int column = strip * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, pitch);

  int64_t const block_t = static_cast<int64_t>(batch) * arguments.row_blocks + block_index;
  auto const q_t_at = [&](int column) {
    return arguments.q_t + (block_t * pitch + column) * kScaleBlock;
  };
  auto const scale_t_at = [&](int column) { return arguments.scale_t + block_t * pitch + column; };
  bool const plain = !kGathers && arguments.q, transposed = kGathers || arguments.q_t;
  if (block.rows == 0) {
    if (transposed) clear_columns(q_t_at(column), scale_t_at(column), end - column);
    return;
  }

  if (first_row_of_warp() >= block.rows) {
    if (transposed) {
      shared.columns.clear();
      shared.transpose.clear();
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
  auto const* x = static_cast<Source const*>(arguments.x);
  auto const source = [&] {
    if constexpr (kGathers) {
      find_rows(arguments, block, shared);
      return Elsewhere{shared.source_rows};
    } else {
      x += first_row_of(arguments.x_batched ? batch : 0) * pitch;
      return Consecutive{};
    }
  }();
  using RowSource = std::remove_const_t<decltype(source)>;
  TileLoader<Source, kAligned, RowSource> loader(shared.stagings, x, pitch, block.rows, column, end,
                                                 source);
#pragma unroll 1
  for (; column < end; column += kScaleBlock) {
    // Otherwise the compiler keeps the addresses of all rows of all arrays for the next tile.
    asm volatile("" : "+r"(pitch));
    Patch<Source> patch = loader.next();
    std::array<uint32_t, kPatchRows> largest;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) largest[i] = patch.row[i].largest_after_poisoning();
    patch.stay_packed();
    if (transposed) {
      shared.columns.reduce(patch, block.grouped);
      __barrier_sync(kTileBarrier);
      scale_columns<kFormat>(shared, scale_t_at(column), pitch - column, power_of_two);
    }
    if (plain) {
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
    if (transposed) {
      if (!block.grouped) patch.clear();
      __barrier_sync(kTileBarrier);
      shared.transpose.template put<kFormat>(
          patch, [&](int j) { return shared.columns.inverse[PatchPosition().column + j]; });
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
  auto const strips = static_cast<unsigned>((tiles + tiles_per_cta - 1) / tiles_per_cta);
  auto const down = static_cast<unsigned>(row_blocks);
  bool const is_aligned = arguments.columns % kOctet == 0, gathers = arguments.source_rows;
  dim3 const grid = gathers ? dim3(down, strips) : dim3(strips, down, arguments.batches);
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    using Source = SourceOf<source>;
    constexpr int kSharedBytes = sizeof(SharedStorage<Source>);
    auto const kernel = gathers ? quantize_ragged_kernel<Source, fp8.value, aligned.value, true>
                                : quantize_ragged_kernel<Source, fp8.value, aligned.value, false>;
    cudaError_t const status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(arguments, tiles_per_cta,
                                                         format.power_of_two);
    return cudaGetLastError();
  });
}

}  // namespace jgg::quantize
