// Quantises matrices in blocks of 128 x 128, and writes them untransposed and transposed. Both
// forms are needed because the FP8 tensor cores contract contiguous dimensions only, and each
// dimension of a weight is contracted in some product.
#include "quantize/format.h"
#include "quantize/tile.h"
#include "quantize/wide_blocks.h"

namespace jgg::quantize {
namespace {

template <class Source, ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    quantize_blocks_kernel(BlocksArguments arguments, TileGrid grid, bool power_of_two) {
  __shared__ alignas(16) TransposeBuffer buffer;
  __shared__ uint32_t warp_largest[kTileWarps];

  int const rows = arguments.rows, columns = arguments.columns;
  TileGrid::Place const place = grid.place();
  int const row = place.down * kScaleBlock, column = place.across * kScaleBlock;
  int64_t const matrix = place.matrix;
  TileExtent const extent{rows - row, columns - column};

  auto patch = Patch<Source>::template load<kAligned>(
      static_cast<Source const*>(arguments.x) + (matrix * rows + row) * columns + column, columns,
      extent);
  uint32_t largest = 0;
#pragma unroll
  for (auto& octet : patch.row) {
    largest = Word<Source>::max(largest, octet.largest_after_poisoning());
  }
  largest = Word<Source>::max_over(largest, 32);
  patch.stay_packed();
  if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (uint32_t const other : warp_largest) largest = Word<Source>::max(largest, other);

  Scale const s = scale_of<kFormat>(Word<Source>::element(largest, 0), power_of_two);
  auto const inverse = [&](int) { return s.inverse; };
  int const pitch = quantize::pitch(arguments);
  int64_t const blocks_across = ceil_div(pitch, kScaleBlock), blocks_down = grid.down;
  TileExtent const stored{extent.rows, stored_columns(arguments) - column};
  if (arguments.q) {
    patch.template store_rows<kFormat, kAligned>(
        arguments.q + (matrix * rows + row) * pitch + column, pitch, stored, inverse);
    if (threadIdx.x == 0) {
      arguments.scale[(matrix * blocks_down + place.down) * blocks_across + place.across] = s.scale;
    }
  }
  patch.stay_packed();
  if (arguments.q_t) {
    buffer.put<kFormat>(patch, inverse);
    __syncthreads();
    buffer.store<kAligned>(arguments.q_t + (matrix * pitch + column) * rows + row, rows,
                           {stored.columns, stored.rows});
    if (threadIdx.x == 0) {
      arguments.scale_t[(matrix * blocks_across + place.across) * blocks_down + place.down] =
          s.scale;
    }
  }
}

}  // namespace

cudaError_t quantize_blocks(QuantizeFormat format, BlocksArguments const& arguments,
                            cudaStream_t stream) {
  TileGrid const grid{unsigned(blocks_of(arguments.columns)), unsigned(blocks_of(arguments.rows))};
  bool const is_aligned =
      arguments.columns % kOctet == 0 && arguments.rows % static_cast<int>(sizeof(uint4)) == 0;
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    using Source = SourceOf<source>;
    if constexpr (sizeof(Source) == 2 && aligned.value) {
      if (suits_wide_tiles(arguments)) {
        return quantize_wide_blocks<Source, fp8.value>(arguments, format.power_of_two, stream);
      }
    }
    quantize_blocks_kernel<Source, fp8.value, aligned.value>
        <<<grid.blocks(arguments.matrices), kTileThreads, 0, stream>>>(arguments, grid,
                                                                       format.power_of_two);
    return cudaGetLastError();
  });
}

}  // namespace jgg::quantize
