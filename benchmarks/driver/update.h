// One triangle of bfloat16 symmetric updates.
#pragma once

#include "problem.h"
#include "rank_k/rank_k.h"

namespace driver {

// "syrk": A A^T, "syr2k": A B^T + B A^T of `groups` matrices [rows, k].
inline Prepared prepare_update(Problem const& problem, Choice const& choice) {
  bool const two_products = problem.kind == "syr2k";
  int64_t const matrices = problem.groups, n = problem.rows, k = problem.k;
  Prepared prepared{};
  auto* a = prepared.keep<void>(random_data<__nv_bfloat16>(matrices * n * k, kLhs));
  auto* b = two_products ? prepared.keep<void>(random_data<__nv_bfloat16>(matrices * n * k, kRhs))
                         : nullptr;
  prepared.out_bytes = matrices * n * n * sizeof(__nv_bfloat16);
  void* const out = prepared.keep<void>(allocate(prepared.out_bytes));
  auto const scale = [&](float value) {
    return prepared.keep<float>(to_device(std::vector<float>(matrices, value)));
  };

  jgg::sm90::RankKArguments arguments{};
  jgg::sm90::RankKStack stack{};
  stack.a = a;
  stack.b = b;
  stack.out = out;
  stack.alpha = scale(1);
  stack.beta = scale(0);
  stack.matrices = problem.groups;
  stack.n = problem.rows;
  stack.k = problem.k;
  arguments.stacks = {stack};
  arguments.type = arguments.out_type = jgg::sm90::ElementType::kBf16;
  arguments.uplo = jgg::Uplo::kLower;
  arguments.other = jgg::sm90::OtherTriangle::kZero;
  auto const tile = jgg::sm90::rank_k_tile_configs().at(choice.config);
  prepared.launch = [=](cudaStream_t stream) { return jgg::sm90::rank_k(tile, arguments, stream); };
  prepared.flops = (two_products ? 2.0 : 1.0) * matrices * n * n * k;

  Reference& reference = prepared.reference;
  reference.lhs = {a, Element::kBf16, n * k, k, 1};
  reference.rhs = {two_products ? b : a, Element::kBf16, n * k, k, 1};
  reference.out = out;
  reference.out_type = Element::kBf16;
  reference.groups = problem.groups;
  reference.rows = reference.columns = problem.rows;
  reference.terms = problem.k;
  reference.stacked = reference.triangular = true;
  reference.two_products = two_products;
  reference.accumulation_error = 1e-5f;
  return prepared;
}

}  // namespace driver
