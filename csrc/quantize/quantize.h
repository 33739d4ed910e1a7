// The interface of the quantisers. A quantiser reads its operand once if the elements that share a
// scale fit into a tile. If they do not, an earlier pass finds the largest magnitudes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "scheduler/host_device.h"
#include "types.h"

namespace jgg::quantize {

struct QuantizeFormat {
  ElementType source;
  ElementType fp8;
  bool power_of_two;  // scales are rounded up to powers of two
};

// x [rows, columns] -> q [rows, columns], scale [rows, ceil(columns / 128)]. With `of` [rows], x is
// [tokens, columns], and row i is of[i] of it, zeros if that is out of range.
struct RowsArguments {
  void const* x;
  uint8_t* q;
  float* scale;
  int rows;
  int columns;
  int const* of = nullptr;
  int tokens = 0;
};

// x [matrices, rows, columns] -> q as x with scale [matrices, ceil(rows / 128),
// ceil(columns / 128)], and both with their last two dimensions exchanged. Either pair may be null.
//
// Results may be some columns of wider matrices, of `joined_columns`, a multiple of 128. Then
// pointers are to the first of those columns, and zeros are written up to the end of a block.
struct BlocksArguments {
  void const* x;
  uint8_t* q;
  float* scale;
  uint8_t* q_t;
  float* scale_t;
  int matrices;
  int rows;
  int columns;
  int joined_columns = 0;  // 0: results are not joined
};

// x [b, rows, columns] -> q and scale as of RowsArguments, and q_t [b, row_blocks, columns, 128]
// with scale_t [b, row_blocks, columns]: scaled along the rows, in transposed blocks of at most 128
// rows of one group, filled up with zeros. Either pair may be null.
struct RaggedArguments {
  void const* x;
  int const* group_sizes;  // [b, groups]
  uint8_t* q;
  float* scale;
  uint8_t* q_t;
  float* scale_t;
  int batches;
  bool x_batched;
  bool group_sizes_batched;
  int groups;
  int rows;
  int columns;
  int row_blocks;
};

// x [tokens, columns] -> q_t [row_blocks, columns, 128] as of RaggedArguments, of rows [rows] that
// are copies of tokens: row i of the row_of[i]-th, zeros where there is none. All rows have the
// scales of x's columns, [columns]. With room for it, x is quantised before it is copied.
struct GatheredArguments {
  void const* x;
  uint8_t* quantized;  // [tokens, quantized_pitch()], or null
  int const* row_of;
  float const* scale;
  int const* group_sizes;  // [groups]
  uint8_t* q_t;
  int tokens;
  int groups;
  int rows;
  int columns;
  int row_blocks;

  JGG_HOST_DEVICE int quantized_pitch() const { return (columns + 15) / 16 * 16; }
};

// x [rows, columns] -> maxima [ceil(rows / kColumnRows), columns]: the largest finite magnitude of
// each column, of so many rows each, of those in the window [first, end).
constexpr int kColumnRows = 256;
struct ColumnsArguments {
  void const* x;
  int const* window;
  float* maxima;
  int rows;
  int columns;
};

// Columns of the matrices that results are part of, and those of a result with its zeros.
template <class Arguments>
JGG_HOST_DEVICE int pitch(Arguments const& a) {
  return a.joined_columns ? a.joined_columns : a.columns;
}
template <class Arguments>
JGG_HOST_DEVICE int stored_columns(Arguments const& a) {
  return a.joined_columns ? (a.columns + kScaleBlock - 1) / kScaleBlock * kScaleBlock : a.columns;
}

cudaError_t column_maxima(ElementType source, ColumnsArguments const& arguments,
                          cudaStream_t stream);
cudaError_t quantize_rows(QuantizeFormat format, RowsArguments const& arguments,
                          cudaStream_t stream);
cudaError_t quantize_blocks(QuantizeFormat format, BlocksArguments const& arguments,
                            cudaStream_t stream);
cudaError_t quantize_ragged(QuantizeFormat format, RaggedArguments const& arguments,
                            cudaStream_t stream);
// `power_of_two` does not matter.
cudaError_t quantize_gathered(QuantizeFormat format, GatheredArguments const& arguments,
                              cudaStream_t stream);

}  // namespace jgg::quantize
