// Translates run-time arguments to the kernels' parameters, except for the matrices.
#pragma once

#include "few_rows/params.h"

namespace jgg::few_rows {

inline Product product_of(mlp::GatedArguments const& a) {
  Product product;
  product.x = static_cast<char const*>(a.x);
  product.rows = a.rows;
  product.divisor = a.divisor;
  product.tokens = a.tokens;
  product.gate_bias = a.gate_bias;
  product.up_bias = a.up_bias;
  product.weights = a.weights;
  product.weights_of_pairs = a.weights_of_pairs;
  product.out = a.hidden;
  product.kept_gate = a.gate;
  product.kept_up = a.up;
  product.has_activation = a.has_activation;
  product.has_up = a.has_up();
  product.activation = mlp::GeneralFunction(a.activation);
  product.groups = a.groups;
  product.k = a.k;
  product.n = a.n;
  product.columns = product.has_up ? 2 * a.n : a.n;
  product.pairs = a.pairs;
  return product;
}

}  // namespace jgg::few_rows
