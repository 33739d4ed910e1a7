// Quantises the rows of a ragged product for all products of a training step, and reads each row
// once. The untransposed result has a scale for each 128 columns of a row, for the forward product
// or the cotangent of lhs. The transposed result has a scale for each 128 rows of a column, for the
// cotangent of the weights.
//
// The cotangent of the weights contracts rows, 128 in a step, so the transpose is made of blocks of
// 128 rows of one group, padded with zeros. Only the device knows the groups, so a CTA looks up the
// rows of its block itself.
#include <algorithm>

#include "multiprocessors.h"
#include "quantize/format.h"
#include "quantize/row_blocks.h"
#include "quantize/tile_loader.h"

namespace jgg::quantize {
namespace {

constexpr int kTilesPerCta = 4;  // the most if there are few groups
// A launch has at least this many thread blocks on a multiprocessor, if there are enough tiles.
constexpr int kCtasPerMultiprocessor = 5;

// Warps with rows and warps without rows wait for each other at different places of the program,
// which __barrier_sync() allows.
constexpr int kTileBarrier = 0;

template <class Source>
struct SharedStorage {
  TransposeBuffer transpose;
  ColumnScales<Source> columns;
  Staging<Source> stagings[2];
};

// Computes the scales of a tile's columns, in the first warps: see `ColumnScales::scale`.
template <ElementType kFormat, class Source>
__device__ __forceinline__ void scale_columns(SharedStorage<Source>& shared, float* scale,
                                              int columns, bool counted, bool power_of_two) {
  int const column = threadIdx.x;
  if (column < kScaleBlock) {
    shared.columns.template scale<kFormat>(column, scale, columns, counted, power_of_two);
  }
}

template <class Source, ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kTileThreads, kCtasPerProcessor<Source, kAligned>)
    quantize_ragged_kernel(RaggedArguments arguments, TileGrid grid, int tiles_per_cta,
                           bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Source>*>(shared_bytes);
  TileGrid::Place const place = grid.place();
  int const batch = place.matrix, rows = arguments.rows;
  int pitch = arguments.columns;
  int const block_index = place.down;
  int const* const group_sizes =
      arguments.group_sizes +
      static_cast<int64_t>(batch) * (arguments.group_sizes_batched ? arguments.groups : 0);
  RowBlock const block = find_block(group_sizes, arguments.groups, rows, block_index);
  int column = place.across * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, pitch);

  int64_t const block_t = static_cast<int64_t>(batch) * arguments.row_blocks + block_index;
  auto const q_t_at = [&](int column) {
    return arguments.q_t + (block_t * pitch + column) * kScaleBlock;
  };
  auto const scale_t_at = [&](int column) { return arguments.scale_t + block_t * pitch + column; };
  bool const plain = arguments.q, transposed = arguments.q_t;
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
        scale_columns<kFormat>(shared, scale_t_at(column), pitch - column, block.grouped,
                               power_of_two);
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
    // Without this, the compiler keeps the addresses of all rows of all arrays for the next tile.
    asm volatile("" : "+r"(pitch));
    Patch<Source> patch = loader.next();
    LargestOfRows<Source> largest;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) largest.set(i, patch.row[i].largest_after_poisoning());
    patch.stay_packed();
    if (transposed) {
      shared.columns.reduce(patch);
      __barrier_sync(kTileBarrier);
      scale_columns<kFormat>(shared, scale_t_at(column), pitch - column, block.grouped,
                             power_of_two);
    }
    if (plain) {
      int64_t const first_row = first_row_of(batch);
      int const blocks_per_row = (pitch + kScaleBlock - 1) / kScaleBlock;
      auto const inverse = scale_rows<kFormat>(
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
  int multiprocessors;
  cudaError_t const counted = count_multiprocessors(multiprocessors);
  if (counted != cudaSuccess) return counted;
  int const least_ctas = kCtasPerMultiprocessor * multiprocessors;
  int const tiles = blocks_of(arguments.columns), row_blocks = arguments.row_blocks;
  // A CTA takes several tiles, as long as each multiprocessor gets several CTAs. The CTA then
  // starts once for all its tiles, and searches once for the group of its rows, 32 groups at a
  // time.
  int64_t const all_tiles = static_cast<int64_t>(tiles) * row_blocks * arguments.batches;
  int const most = std::max(kTilesPerCta, arguments.groups / kWarpSize);
  int const tiles_per_cta = static_cast<int>(std::clamp<int64_t>(all_tiles / least_ctas, 1, most));
  TileGrid const grid{unsigned(ceil_div(tiles, tiles_per_cta)), unsigned(row_blocks)};
  bool const is_aligned = arguments.columns % kOctet == 0;
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    using Source = SourceOf<source>;
    constexpr int kSharedBytes = sizeof(SharedStorage<Source>);
    auto const kernel = quantize_ragged_kernel<Source, fp8.value, aligned.value>;
    cudaError_t const status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid.blocks(arguments.batches), kTileThreads, kSharedBytes, stream>>>(
        arguments, grid, tiles_per_cta, format.power_of_two);
    return cudaGetLastError();
  });
}

}  // namespace jgg::quantize
