// alpha or beta of a stack of matrices.
#pragma once

namespace jgg::sm90 {

// A float for each matrix of a stack, or one for all.
struct MatrixScales {
  float const* values;
  int stride;

  __device__ float const& at(int matrix) const { return values[matrix * stride]; }
};

}  // namespace jgg::sm90
