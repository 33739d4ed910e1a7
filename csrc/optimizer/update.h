// The interface of the steps of an optimiser that write the FP8 weights of the next forward pass.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.h"

namespace jgg::optimizer {

// An array of bf16, f16 or float32.
struct Elements {
  void* data;
  ElementType type;
};

// Matrices [matrices, rows, columns] and their FP8 forms in blocks of 128 x 128, all updated in
// place. The forms are those of `quantize::BlocksArguments`. Either q and scale or q_t and scale_t
// may be null. The forms may be columns of wider matrices, which have `joined_columns` columns.
struct Weights {
  float* master;
  Elements copy;  // the weights in 16 bits, or null
  uint8_t* q;
  float* scale;
  uint8_t* q_t;
  float* scale_t;
  ElementType fp8;
  bool power_of_two;
  int matrices;
  int rows;
  int columns;
  int joined_columns = 0;  // 0: forms are not joined
};

// The numbers of one step of AdamW. They are in device memory, because schedules of the optimiser
// compute them there. Python writes them in this order.
struct AdamwScalars {
  float applies;          // 0: the step is skipped, and nothing changes
  float gradient_factor;  // what gradients are multiplied by first
  float mean_decay;       // mean = mean_decay mean + mean_share gradient
  float mean_share;
  float square_decay;  // square = square_decay square + square_share gradient^2
  float square_share;
  float square_factor;  // size = sqrt(square_factor square + inner_epsilon) + epsilon
  float inner_epsilon;
  float epsilon;
  float mean_rate;  // master -= (mean_rate mean + gradient_rate gradient) / size + decay master
  float gradient_rate;
  float decay;
};

// Gradients are bf16 or f32, and so are both moments.
struct AdamwArguments {
  AdamwScalars const* scalars;
  Elements gradient;
  Elements mean;
  Elements square;
  Weights weights;
};

// Adds `update` (bf16 or f32) to master, unless *applies is 0.
struct ApplyArguments {
  float const* applies;
  Elements update;
  Weights weights;
};

cudaError_t adamw_quantized(AdamwArguments const& arguments, cudaStream_t stream);
cudaError_t apply_and_quantize(ApplyArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::optimizer
