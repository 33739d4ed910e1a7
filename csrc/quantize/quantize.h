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
// [tokens, columns], and row i of q is row of[i] of x, or zeros if of[i] is out of range.
struct RowsArguments {
  void const* x;
  uint8_t* q;
  float* scale;
  int rows;
  int columns;
  int const* of = nullptr;
  int tokens = 0;
};

// x [matrices, rows, columns] -> q of the same shape with scale [matrices, ceil(rows / 128),
// ceil(columns / 128)], and q_t and scale_t, which are q and scale with their last two dimensions
// exchanged. Either q and scale or q_t and scale_t may be null.
//
// The results may be some columns of wider matrices, which have `joined_columns` columns, a
// multiple of 128. Pointers then point to the first column of the results, and the quantiser writes
// zeros up to the end of the last block of columns.
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

// x [b, rows, columns] -> q and scale as in RowsArguments, and q_t [b, row_blocks, columns, 128]
// with scale_t [b, row_blocks, columns]. q_t has transposed blocks of at most 128 rows of one
// group, padded with zeros. scale_t has a scale for each column of each block. Either q and scale
// or q_t and scale_t may be null.
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

// x [tokens, columns] -> q_t [row_blocks, columns, 128] as in RaggedArguments, for `rows` rows that
// are copies of tokens. Row i is token row_of[i], or zeros if there is no such token. `scale`
// [columns] has the scale of each column, for all rows. If `quantized` is not null, x is first
// quantised to it and then copied.
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
// each column in each chunk of kColumnRows rows. Only rows in `window` [first, end) count.
constexpr int kColumnRows = 256;
struct ColumnsArguments {
  void const* x;
  int const* window;
  float* maxima;
  int rows;
  int columns;
};

// pitch() returns the columns of the matrices that results are part of. stored_columns() returns
// the columns of a result with its padding.
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
// `format.power_of_two` is ignored, because the caller gives the scales.
cudaError_t quantize_gathered(QuantizeFormat format, GatheredArguments const& arguments,
                              cudaStream_t stream);

}  // namespace jgg::quantize
