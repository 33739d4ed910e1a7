// The elementwise steps of an expert MLP in FP8. They read the bfloat16 results of a product once,
// and write them quantised for the next product. This header does not include CUTLASS.
//
// Projections have the shape [rows, 2 * pitch], where `pitch` is the next multiple of 128: the
// columns of gate, zeros up to `pitch`, and then up in the same way. Quantised rows have a scale
// for each 1 x 128.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mlp/gated_ragged_dot.h"
#include "scheduler/ceil_div.h"

namespace jgg::mlp {

struct QuantizedHiddenFormat {
  ElementType fp8;
  bool power_of_two;  // scales are rounded up to powers of two
};

// Rows of projections and how they become hidden = weight * activation(gate) * up, rounded to the
// type of the projections.
struct Projections {
  void const* data;
  float const* weights;  // [rows]
  Activation activation;
  int rows;
  int columns;  // of hidden

  __host__ __device__ int blocks() const { return ceil_div(columns, kScaleBlock); }
  __host__ __device__ int pitch() const { return blocks() * kScaleBlock; }
};

// The results are q [rows, columns] and scale [rows, blocks] of hidden. If there is a count, only
// the first `*count` rows are computed. No group owns the other rows. With several devices, these
// are half of a buffer or more.
struct QuantizedHidden {
  Projections projections;
  int const* count;
  uint8_t* q;
  float* scale;
};

// Computes the gradients of gate and of up, [rows, columns] each, from dh [rows, columns], the
// gradient of hidden. Both gradients are also stored quantised, in the layout of projections.
// `hidden` is computed again, and may be the memory of dh. `dweights` [rows, blocks] is the
// gradient of each row's weight, with one sum for each block of columns.
struct QuantizedGradients {
  Projections projections;
  void const* dh;
  uint8_t* q;    // [rows, 2 * pitch]
  float* scale;  // [rows, 2 * blocks]
  void* dgate;
  void* dup;
  void* hidden;
  float* dweights;
};

struct RaggedGradientsFormat {
  ElementType forward;   // of hidden
  ElementType gradient;  // of the gradients
  bool power_of_two;
};

// q [row_blocks, columns, 128] and scale [row_blocks, columns]: scaled along the rows, in
// transposed blocks of at most 128 rows of one group, see `quantize::RaggedArguments`.
struct TransposedBlocks {
  uint8_t* q;
  float* scale;
};

// Like QuantizedGradients, except that the gradients of gate and up, and hidden, are stored as
// transposed blocks, in this order. `columns` is a multiple of 8.
struct RaggedGradients {
  Projections projections;
  void const* dh;
  int const* group_sizes;
  int groups;
  int row_blocks;
  uint8_t* q;
  float* scale;
  TransposedBlocks transposed[3];
  float* dweights;
};

cudaError_t quantize_hidden(QuantizedHiddenFormat format, QuantizedHidden const& arguments,
                            cudaStream_t stream);
cudaError_t quantize_gradients(QuantizedHiddenFormat format, QuantizedGradients const& arguments,
                               cudaStream_t stream);
cudaError_t quantize_ragged_gradients(RaggedGradientsFormat format,
                                      RaggedGradients const& arguments, cudaStream_t stream);

}  // namespace jgg::mlp
