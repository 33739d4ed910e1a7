// Copies tokens to the rows of their experts as the gradient of weights reads them: transposed and
// quantised, which is one pass where a copy and a quantiser would write and read 16 bits between.
//
// Scales are those of the tokens' columns, so that nothing has to be known of a block before it is
// written. All blocks of some columns come before those of others: the tokens' part of these
// columns stays in L2, however often it is read.
#include <algorithm>

#include "quantize/format.h"
#include "quantize/row_blocks.h"
#include "quantize/tile_loader.h"

namespace jgg::quantize {
namespace {

constexpr int kTilesPerCta = 8;
constexpr int kLeastCtas = 640;  // two turns and more for every processor

// Warps with and without rows meet at different places of the program.
constexpr int kTileBarrier = 0;

template <class Source>
struct SharedStorage {
  TransposeBuffer transpose;
  float inverse[kScaleBlock];  // of the columns' scales
  int row_of[kScaleBlock];
  Staging<Source> stagings[2];
};

// Notes which tokens the warp's own rows are.
template <class Source>
__device__ __forceinline__ void find_tokens(GatheredArguments const& arguments,
                                            RowBlock const& block, SharedStorage<Source>& shared) {
  constexpr int kRowsPerWarp = 32 / kPatchesAcross * kPatchRows;
  int const lane = threadIdx.x % 32, row = first_row_of_warp() + lane;
  if (lane < kRowsPerWarp) {
    int const token = row < block.rows ? __ldg(arguments.row_of + block.first + row) : -1;
    shared.row_of[row] = token < arguments.tokens ? token : -1;
  }
  __syncwarp();
}

template <class Source, ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kTileThreads, kCtasPerProcessor<Source, kAligned>)
    quantize_gathered_kernel(GatheredArguments arguments, int tiles_per_cta) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Source>*>(shared_bytes);
  int pitch = arguments.columns;
  RowBlock const block =
      find_block(arguments.group_sizes, arguments.groups, arguments.rows, blockIdx.x);
  int column = blockIdx.y * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, pitch);
  auto const q_t_at = [&](int column) {
    return arguments.q_t + (static_cast<int64_t>(blockIdx.x) * pitch + column) * kScaleBlock;
  };
  if (block.rows == 0 || !block.grouped) {
    clear_columns(q_t_at(column), nullptr, end - column);
    return;
  }
  // Of the tile at `column`, by the first warps.
  auto const find_inverses = [&](int column) {
    if (threadIdx.x < kScaleBlock && column + static_cast<int>(threadIdx.x) < end) {
      shared.inverse[threadIdx.x] = __frcp_rn(__ldg(arguments.scale + column + threadIdx.x));
    }
  };
  // The tile's pieces are all in shared memory.
  auto const store = [&](int column) {
    __barrier_sync(kTileBarrier);
    find_inverses(column + kScaleBlock);
    shared.transpose.template store<true>(q_t_at(column), kScaleBlock,
                                          {pitch - column, kScaleBlock});
  };
  find_inverses(column);
  if (first_row_of_warp() >= block.rows) {
    shared.transpose.clear();
    for (; column < end; column += kScaleBlock) {
      __barrier_sync(kTileBarrier);
      store(column);
    }
    return;
  }

  find_tokens(arguments, block, shared);
  TileLoader<Source, kAligned, Elsewhere> loader(shared.stagings,
                                                 static_cast<Source const*>(arguments.x), pitch,
                                                 block.rows, column, end, {shared.row_of});
#pragma unroll 1
  for (; column < end; column += kScaleBlock) {
    // Otherwise the compiler keeps the addresses of all rows for the next tile.
    asm volatile("" : "+r"(pitch));
    Patch<Source> patch = loader.next();
#pragma unroll
    for (auto& octet : patch.row) octet.largest_after_poisoning();
    patch.stay_packed();
    __barrier_sync(kTileBarrier);
    shared.transpose.template put<kFormat>(
        patch, [&](int j) { return shared.inverse[PatchPosition().column + j]; });
    store(column);
  }
}

}  // namespace

cudaError_t quantize_gathered(QuantizeFormat format, GatheredArguments const& arguments,
                              cudaStream_t stream) {
  int const tiles = blocks_of(arguments.columns);
  int64_t const all_tiles = static_cast<int64_t>(tiles) * arguments.row_blocks;
  int const tiles_per_cta =
      static_cast<int>(std::clamp<int64_t>(all_tiles / kLeastCtas, 1, kTilesPerCta));
  dim3 const grid(arguments.row_blocks, ceil_div(tiles, tiles_per_cta));
  bool const is_aligned = arguments.columns % kOctet == 0;
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    using Source = SourceOf<source>;
    constexpr int kSharedBytes = sizeof(SharedStorage<Source>);
    auto const kernel = quantize_gathered_kernel<Source, fp8.value, aligned.value>;
    cudaError_t const status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(arguments, tiles_per_cta);
    return cudaGetLastError();
  });
}

}  // namespace jgg::quantize
