// Quantises matrices, and rows, that have a scale a row, a scale a column, or one of all: the
// largest magnitudes of blocks, which scales follow from, and then the division by scales.
#include "quantize/format.h"
#include "quantize/row_blocks.h"
#include "quantize/tile.h"

namespace jgg::quantize {
namespace {

// The tile of a thread block.
struct Tile {
  int64_t matrix;
  int row;
  int column;

  __device__ __forceinline__ explicit Tile(TileGrid::Place const& place)
      : matrix(place.matrix), row(place.down * kScaleBlock), column(place.across * kScaleBlock) {}
};

template <class Arguments>
TileGrid tiles_of(Arguments const& arguments) {
  return {unsigned(blocks_of(arguments.columns)), unsigned(blocks_of(arguments.rows))};
}

template <class Source, bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    matrix_maxima_kernel(MatrixMaximaArguments arguments, TileGrid grid) {
  __shared__ ColumnScales<Source> of_columns;
  TileGrid::Place const place = grid.place();
  Tile const tile(place);
  int const rows = arguments.rows, columns = arguments.columns;
  TileExtent const extent{rows - tile.row, columns - tile.column};
  int64_t const first_row = tile.matrix * rows + tile.row;
  auto patch = Patch<Source>::template load<kAligned>(
      static_cast<Source const*>(arguments.x) + first_row * columns + tile.column, columns, extent);
  LargestOfRows<Source> of_rows;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    patch.row[i].poison();
    of_rows.set(i, patch.row[i].largest());
  }
  if (arguments.of_rows) {
    float const largest = of_rows.reduce();
    int const lane = threadIdx.x % kPatchesAcross;
    int const row = PatchPosition().row + lane % kPatchRows;
    if (lane < kPatchRows && row < extent.rows) {
      arguments.of_rows[(first_row + row) * grid.across + place.across] = largest;
    }
  }
  if (arguments.of_columns) {
    of_columns.reduce(patch);
    __syncthreads();
    int const column = threadIdx.x;
    if (column < kScaleBlock && column < extent.columns) {
      int64_t const block = tile.matrix * grid.down + place.down;
      arguments.of_columns[block * columns + tile.column + column] = of_columns.largest(column);
    }
  }
}

template <class Source, ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    quantize_channels_kernel(ChannelsArguments arguments, TileGrid grid) {
  __shared__ alignas(16) TransposeBuffer buffer;
  Tile const tile(grid.place());
  PatchPosition const at;
  int const rows = arguments.rows, columns = arguments.columns, pitch = quantize::pitch(arguments);
  TileExtent const extent{rows - tile.row, columns - tile.column};
  TileExtent const stored{extent.rows, stored_columns(arguments) - tile.column};
  int64_t const first_row = tile.matrix * rows + tile.row;
  auto patch = Patch<Source>::template load<kAligned>(
      static_cast<Source const*>(arguments.x) + first_row * columns + tile.column, columns, extent);
#pragma unroll
  for (auto& octet : patch.row) octet.poison();
  patch.stay_packed();
  // Rows and columns past the matrix are not stored, so their factor does not matter.
  auto const inverse_of = [](float const* scale, bool exists) {
    return exists ? __frcp_rn(__ldg(scale)) : 0.0f;
  };
  if (arguments.q) {
    float const* const scale = arguments.row_scale + first_row;
    patch.template store_rows<kFormat, kAligned>(
        arguments.q + first_row * pitch + tile.column, pitch, stored,
        [&](int i) { return inverse_of(scale + at.row + i, at.row + i < extent.rows); });
    patch.stay_packed();
  }
  if (arguments.q_t) {
    int64_t const first_column = tile.matrix * pitch + tile.column;
    float const* const scale = arguments.column_scale + first_column;
    buffer.template put<kFormat>(patch, [&](int j) {
      return inverse_of(scale + at.column + j, at.column + j < extent.columns);
    });
    __syncthreads();
    buffer.template store<kAligned>(arguments.q_t + first_column * rows + tile.row, rows,
                                    {stored.columns, stored.rows});
  }
}

}  // namespace

cudaError_t matrix_maxima(ElementType source, MatrixMaximaArguments const& arguments,
                          cudaStream_t stream) {
  TileGrid const grid = tiles_of(arguments);
  return with_constants(
      [&](auto type, auto aligned) {
        matrix_maxima_kernel<SourceOf<type>, aligned.value>
            <<<grid.blocks(arguments.matrices), kTileThreads, 0, stream>>>(arguments, grid);
        return cudaGetLastError();
      },
      OneOf<ElementType::kBf16, ElementType::kF16, ElementType::kF32>{source},
      Flag{arguments.columns % kOctet == 0});
}

cudaError_t quantize_channels(QuantizeFormat format, ChannelsArguments const& arguments,
                              cudaStream_t stream) {
  bool const is_aligned =
      arguments.columns % kOctet == 0 &&
      (arguments.q_t == nullptr || arguments.rows % static_cast<int>(sizeof(uint4)) == 0);
  TileGrid const grid = tiles_of(arguments);
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    quantize_channels_kernel<SourceOf<source>, fp8.value, aligned.value>
        <<<grid.blocks(arguments.matrices), kTileThreads, 0, stream>>>(arguments, grid);
    return cudaGetLastError();
  });
}

}  // namespace jgg::quantize
