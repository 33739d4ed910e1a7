// The parameters of the kernels of packed matrices.
#pragma once

#include "few_rows/product.h"
#include "packed/decode.h"
#include "packed/packed.h"
#include "scheduler/ceil_div.h"

namespace jgg::packed {

struct Params : few_rows::Product {
  Matrices gate;
  Matrices up;
  int group_shift;
  mlp::Form form;            // of the decoding kernel
  mlp::GatedFunction gated;  // used if the form is kPlain or kGated
  float* partial_sums;       // [blocks, 16 x 128], of the kernel for few rows
  uint32_t* announcements;   // [blocks]
  bool has_row_boxes;        // whether TMA loads rows (DecodingConfig::kMayHaveRowBoxes)
  CUtensorMap row_boxes;     // of x

  // Return the number of records of a matrix along n and along k.
  __device__ int strips() const { return (n + kSide - 1) / kSide; }
  __device__ int records() const { return (k + kSide - 1) / kSide; }
};

// Returns log2 of the elements of an int4 group over 32. A group shares a scale and a zero point.
inline int shift_of(int group_size) { return group_size >= 128 ? 2 : group_size >= 64 ? 1 : 0; }

inline Params make_params(Arguments const& a) {
  Params params{};
  static_cast<few_rows::Product&>(params) = few_rows::product_of(a.product);
  params.gate = a.gate;
  params.up = a.up;
  params.has_up = a.product.has_activation && a.up.values != nullptr;
  params.group_shift = shift_of(a.group_size);
  params.form = a.product.has_activation ? mlp::form_of(a.product.activation, params.has_up)
                                         : mlp::Form::kNone;
  params.gated = mlp::GatedFunction(a.product.activation);
  if (params.form == mlp::Form::kNone) params.kept_gate = params.kept_up = nullptr;
  params.columns = params.has_up ? 2 * params.n : params.n;
  return params;
}

}  // namespace jgg::packed
