// Problems that compute one triangle of symmetric updates, in bfloat16 or in double precision.
#pragma once

#include "fp64/rank_k.h"
#include "fp64/tile_table.h"
#include "problem.h"
#include "rank_k/rank_k.h"
#include "rank_k/tiles.h"

namespace driver {

// Returns a stack with random operands, and with alpha = 1 and beta = 0 for each matrix. A complex
// number is stored as two numbers of type T.
template <class T, class Scale, class Stack>
Stack prepare_stack(Problem const& problem, bool two_products, bool complex, Prepared& prepared) {
  int const parts = complex ? 2 : 1;
  int64_t const matrices = problem.groups, n = problem.rows, k = parts * problem.k;
  auto const operand = [&](Seed seed) {
    return prepared.keep<void>(random_data<T>(matrices * n * k, seed));
  };
  auto const scale = [&](Scale value) {
    std::vector<Scale> values(matrices * parts);
    for (int64_t i = 0; i < matrices; ++i) values[i * parts] = value;
    return prepared.keep<Scale>(to_device(values));
  };
  prepared.out_bytes = matrices * n * n * parts * sizeof(T);
  Stack stack{};
  stack.a = operand(kLhs);
  stack.b = two_products ? operand(kRhs) : nullptr;
  stack.out = prepared.keep<void>(allocate(prepared.out_bytes));
  stack.alpha = scale(1);
  stack.beta = scale(0);
  stack.matrices = problem.groups;
  stack.n = problem.rows;
  stack.k = problem.k;
  return stack;
}

template <class Stack>
Reference update_reference(Problem const& problem, Stack const& stack, Element type, bool complex) {
  int64_t const n = problem.rows, k = problem.k;
  // The real part of x conj(y) is Re x Re y + Im x Im y. So the real part of a product of complex
  // rows is a product of real rows with twice as many numbers.
  int64_t const terms = complex ? 2 * k : k;
  Reference reference{};
  reference.lhs = {stack.a, type, n * terms, terms, 1};
  reference.rhs = {stack.b ? stack.b : stack.a, type, n * terms, terms, 1};
  reference.out = stack.out;
  reference.out_type = type;
  reference.complex = complex;
  reference.groups = problem.groups;
  reference.rows = reference.columns = problem.rows;
  reference.terms = static_cast<int>(terms);
  reference.stacked = reference.triangular = true;
  reference.two_products = stack.b != nullptr;
  reference.accumulation_error = type == Element::kF64 ? 1e-14f : 1e-5f;
  return reference;
}

inline double update_flops(Problem const& problem, bool two_products, bool complex) {
  return (two_products ? 2.0 : 1.0) * (complex ? 4 : 1) * problem.groups * problem.rows *
         problem.rows * problem.k;
}

// "syrk" computes A A^T, and "syr2k" A B^T + B A^T, for `groups` matrices [rows, k].
inline Prepared prepare_update(Problem const& problem, Choice const& choice) {
  using jgg::ElementType, jgg::OtherTriangle, jgg::RankKStack;
  bool const two_products = problem.kind == "syr2k";
  Prepared prepared{};
  auto const stack =
      prepare_stack<__nv_bfloat16, float, RankKStack>(problem, two_products, false, prepared);
  jgg::RankKArguments arguments{};
  arguments.stacks = {stack};
  arguments.type = arguments.out_type = ElementType::kBf16;
  arguments.uplo = jgg::Uplo::kLower;
  arguments.other = OtherTriangle::kZero;
  auto const tile = list(jgg::sm90::RankKTiles{}).at(choice.config);
  prepared.launch = [=](cudaStream_t stream) { return jgg::rank_k(tile, arguments, stream); };
  prepared.flops = update_flops(problem, two_products, false);
  prepared.reference = update_reference(problem, stack, Element::kBf16, false);
  return prepared;
}

// "syr2k_f64" computes A B^T + B A^T, and "her2k_c128" A B^H + B A^H.
inline Prepared prepare_fp64_update(Problem const& problem, Choice const& choice) {
  using jgg::ElementType, jgg::fp64::RankKStack;
  bool const complex = problem.kind == "her2k_c128";
  Prepared prepared{};
  auto const stack = prepare_stack<double, double, RankKStack>(problem, true, complex, prepared);
  jgg::fp64::RankKArguments arguments{};
  arguments.stacks = {stack};
  arguments.type = complex ? ElementType::kC128 : ElementType::kF64;
  arguments.uplo = jgg::Uplo::kLower;
  arguments.other = jgg::OtherTriangle::kZero;
  arguments.hermitian = complex;
  auto const tiles = complex ? list(jgg::fp64::TilesOf<ElementType::kC128>::Table{})
                             : list(jgg::fp64::TilesOf<ElementType::kF64>::Table{});
  auto const tile = tiles.at(choice.config);
  prepared.launch = [=](cudaStream_t stream) {
    return jgg::fp64::rank_k_fp64(tile, arguments, stream);
  };
  prepared.flops = update_flops(problem, true, complex);
  prepared.reference = update_reference(problem, stack, Element::kF64, complex);
  return prepared;
}

}  // namespace driver
