// The epilogue of symmetric results. A tile goes through shared memory, where both an element and
// its mirror image are found: they are added on the diagonal, and stored to both places.
#pragma once

#include "fp64/mainloop.h"
#include "fp64/rank_k_problem.h"

namespace jgg::fp64 {

template <class Config>
class RankKEpilogue {
  using Problem = RankKProblem<Config>;
  using Element = typename Config::Element;
  using Sum = Value<Element>;
  static constexpr int kElements = Config::kTile * Config::kTile / Config::kThreads;

 public:
  __device__ RankKEpilogue(typename Problem::Params const& params, int round, void* staged)
      : params_(params),
        tile_(Problem::tile(params, forgotten(round))),
        stack_(params.stacks[tile_.stack]),
        staged_(static_cast<Sum*>(staged)),
        out_(stack_.out + int64_t(tile_.matrix) * stack_.n * stack_.n) {}

  __device__ void store(Accumulators<Config>& accumulators) {
    accumulators.for_each_value(
        [&](int row, int column, Sum value) { staged(row, column) = value; });
    __syncthreads();
    store_computed();
    if (params_.other == OtherTriangle::kKept) return;
    __syncthreads();
    store_other();
    // The next tile's first step is behind a barrier of the mainloop.
  }

 private:
  __device__ Sum& staged(int row, int column) const {
    return staged_[StagedLayout<Config>::index(row, column)];
  }

  __device__ Sum flip(Sum x) const { return params_.hermitian ? conjugate(x) : x; }

  __device__ bool is_computed(int row, int column) const {
    if (!tile_.diagonal) return true;
    return params_.uplo == Uplo::kLower ? column <= row : row <= column;
  }

  __device__ Element& out_at(int row, int column) const {
    return out_[int64_t(row) * stack_.n + column];
  }

  // alpha * product + beta * C in the computed triangle. As in BLAS, C is not read where beta is
  // zero, nor is the imaginary part of a Hermitian diagonal.
  __device__ void store_computed() const {
    bool const adds_mirror = params_.two_products && tile_.diagonal;
    Sum alpha = widen(stack_.alpha[tile_.matrix]);
    // What the sums were multiplied with when the second product began.
    if (params_.hermitian && params_.two_products && !tile_.diagonal) alpha = conjugate(alpha);
    Sum const beta = params_.adds_c ? widen(stack_.beta[tile_.matrix]) : Sum{};
    bool const adds_c = !is_zero(beta);
    // All loads of a batch are under way before the first is used.
    constexpr int kBatch = 8;
#pragma unroll 1
    for (int batch = 0; batch < kElements; batch += kBatch) {
      Element c[kBatch] = {};
      if (adds_c) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          auto const [row, column] = place_of<Config>(batch + i);
          if (is_stored(row, column)) c[i] = out_at(tile_.m + row, tile_.n + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        auto const [row, column] = place_of<Config>(batch + i);
        if (!is_stored(row, column)) continue;
        Sum value = times(alpha, staged(row, column));
        if (adds_mirror) value = plus(value, flip(times(alpha, staged(column, row))));
        if (adds_c) value = plus(value, times(beta, widen(c[i])));
        if (params_.hermitian && tile_.diagonal && row == column) value = real_part(value);
        out_at(tile_.m + row, tile_.n + column) = narrow<Element>(value);
        // Nobody else reads it before the barrier: mirror images are not in the triangle.
        staged(row, column) = value;
      }
    }
  }

  __device__ bool is_stored(int row, int column) const {
    return tile_.m + row < stack_.n && tile_.n + column < stack_.n && is_computed(row, column);
  }

  // The mirror image, or zeros in its place: rows and columns of the tile exchange places.
  __device__ void store_other() const {
#pragma unroll 4
    for (int i = 0; i < kElements; ++i) {
      auto const [row, column] = place_of<Config>(i);
      if (tile_.n + row >= stack_.n || tile_.m + column >= stack_.n) continue;
      if (tile_.diagonal && is_computed(row, column)) continue;
      Sum const value =
          params_.other == OtherTriangle::kMirrored ? flip(staged(column, row)) : Sum{};
      out_at(tile_.n + row, tile_.m + column) = narrow<Element>(value);
    }
  }

  typename Problem::Params const& params_;
  TriangularTile tile_;
  typename Problem::Stack const& stack_;
  Sum* staged_;
  Element* out_;
};

}  // namespace jgg::fp64
