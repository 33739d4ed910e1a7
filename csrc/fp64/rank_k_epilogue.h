// The epilogue of symmetric results. If an element and its mirror image are added, or both are
// stored, the tile goes through shared memory, where threads find both. Other tiles are stored
// directly from registers.
#pragma once

#include "fp64/direct_store.h"
#include "fp64/rank_k_problem.h"

namespace jgg::fp64 {

template <class Config>
class RankKEpilogue {
  using Problem = RankKProblem<Config>;
  using Element = typename Config::Element;
  using Sum = Value<Element>;

 public:
  __device__ RankKEpilogue(typename Problem::Params const& params, TriangularTile const& tile,
                           void* staged)
      : params_(params),
        tile_(tile),
        stack_(params.stacks[tile_.stack]),
        n_(stack_.n),
        staged_(static_cast<Sum*>(staged)),
        out_(stack_.out + int64_t(tile_.matrix) * stack_.n * stack_.n) {}

  __device__ void store(Accumulators<Config>& accumulators) {
    if (is_stored_directly()) {
      store_directly(accumulators, alpha(), &out_at(tile_.m, tile_.n), n_ - tile_.m, n_ - tile_.n,
                     n_);
      if (params_.other == OtherTriangle::kZero) store_zeros();
      return;
    }
    accumulators.for_each_value(
        [&](int row, int column, Sum value) { staged(row, column) = value; });
    __syncthreads();
    store_computed();
    if (params_.other == OtherTriangle::kMirrored) {
      __syncthreads();
      store_mirror_image();
    } else if (params_.other == OtherTriangle::kZero && !tile_.diagonal) {
      store_zeros();
    }
    // No barrier is needed here, because the mainloop has one before the next tile is staged.
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

  __device__ Element& out_at(int row, int column) const { return out_[int64_t(row) * n_ + column]; }

  __device__ Sum beta() const { return params_.adds_c ? stack_.beta.at(tile_.matrix) : Sum{}; }

  __device__ Sum alpha() const {
    Sum const alpha = stack_.alpha.at(tile_.matrix);
    // The first product was multiplied by alpha / conj(alpha) before the second product was added,
    // so conj(alpha) is the factor of both.
    bool const is_conjugated = params_.hermitian && params_.two_products && !tile_.diagonal;
    return is_conjugated ? conjugate(alpha) : alpha;
  }

  // If C is read, the tile goes through shared memory, so that a warp reads contiguous elements.
  __device__ bool is_stored_directly() const {
    return !tile_.diagonal && params_.other != OtherTriangle::kMirrored && is_zero(beta());
  }

  // A thread works on a batch of rows in one column, so that a warp's elements are contiguous. All
  // accesses of a batch are in flight together. If elements were accessed one by one, the sum of
  // the latencies would be a quarter of the time of a tile's products with k = 1024. For the same
  // reason, conditions select values and places instead of branching. With branches, a tile on the
  // diagonal took 19300 cycles, as long as 9 steps.
  static constexpr int kBatch = 8, kRowStep = Config::kThreads / Config::kTile;
  static constexpr int kBatchRows = kBatch * kRowStep;
  static_assert(Config::kThreads % Config::kTile == 0 && Config::kTile % kBatchRows == 0);
  using Batch = Sum[kBatch];

  __device__ static int first_row() { return threadIdx.x / Config::kTile; }
  __device__ static int column() { return threadIdx.x % Config::kTile; }

  // Calls function(i, row) for each row of the batch that begins at `first`.
  template <class Function>
  __device__ static void for_each(int first, Function const& function) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) function(i, first + i * kRowStep);
  }

  // Stores alpha * product + beta * C in the computed triangle. As in BLAS, C is not read if beta
  // is zero, and the imaginary part of a Hermitian diagonal is ignored. If the other triangle has
  // to be zero, its zeros in a tile on the diagonal are stored too.
  __device__ void store_computed() const {
    bool const adds_mirror = params_.two_products && tile_.diagonal;
    bool const adds_zeros = params_.other == OtherTriangle::kZero;
    bool const is_mirrored = params_.other == OtherTriangle::kMirrored;
    Sum const alpha = this->alpha(), beta = this->beta();
    bool const adds_c = !is_zero(beta);
    bool const is_real_diagonal = params_.hermitian && tile_.diagonal;
    int const column = this->column();
    bool const has_column = tile_.n + column < n_;
#pragma unroll 1
    for (int first = first_row(); first < Config::kTile; first += kBatchRows) {
      Element* const out = &out_at(tile_.m + first, tile_.n + column);
      auto const out_at = [&](int i) -> Element& { return out[int64_t(i) * kRowStep * n_]; };
      bool inside[kBatch], stored[kBatch];
      Element c[kBatch] = {};
      Batch values;
      for_each(first, [&](int i, int row) {
        inside[i] = has_column && tile_.m + row < n_;
        stored[i] = inside[i] && is_computed(row, column);
        if (adds_c && stored[i]) c[i] = out_at(i);
      });
      for_each(first, [&](int i, int row) { values[i] = times(alpha, staged(row, column)); });
      if (adds_mirror) {
        for_each(first, [&](int i, int row) {
          // An element that is not stored reads itself, because other threads overwrite its mirror
          // image.
          Sum const image = staged(stored[i] ? column : row, stored[i] ? row : column);
          values[i] = plus(values[i], flip(times(alpha, image)));
        });
      }
      if (adds_c) {
        for_each(first, [&](int i, int) { values[i] = plus(values[i], times(beta, widen(c[i]))); });
      }
      if (is_real_diagonal) {
        for_each(first, [&](int i, int row) {
          if (row == column) values[i] = real_part(values[i]);
        });
      }
      for_each(first, [&](int i, int) {
        Element const value = narrow<Element>(stored[i] ? values[i] : Sum{});
        if (stored[i] || (adds_zeros && inside[i])) out_at(i) = value;
      });
      if (!is_mirrored) continue;
      for_each(first, [&](int i, int row) {
        // No other thread reads this element before the barrier, because all mirror images lie
        // outside of the triangle.
        if (stored[i]) staged(row, column) = values[i];
      });
    }
  }

  // Stores the mirror image of the tile.
  __device__ void store_mirror_image() const {
    int const column = this->column();
    bool const has_column = tile_.m + column < n_;
#pragma unroll 1
    for (int first = first_row(); first < Config::kTile; first += kBatchRows) {
      Element* const out = &out_at(tile_.n + first, tile_.m + column);
      Batch values;
      for_each(first, [&](int i, int row) { values[i] = flip(staged(column, row)); });
      for_each(first, [&](int i, int row) {
        bool const stored =
            has_column && tile_.n + row < n_ && !(tile_.diagonal && is_computed(row, column));
        if (stored) out[int64_t(i) * kRowStep * n_] = narrow<Element>(values[i]);
      });
    }
  }

  // Stores zeros in place of the mirror image of a tile that is not on the diagonal.
  __device__ void store_zeros() const {
    Element* const out = &out_at(tile_.n, tile_.m);
    int const rows = n_ - tile_.n, columns = n_ - tile_.m;
    if (n_ * sizeof(Element) % 16 == 0) {
      store_zeros<uint4>(out, rows, columns);
    } else {
      store_zeros<Element>(out, rows, columns);
    }
  }

  template <class Unit>
  __device__ void store_zeros(Element* out, int rows, int columns) const {
    constexpr int kColumns = sizeof(Unit) / sizeof(Element), kUnits = Config::kTile / kColumns;
#pragma unroll 1
    for (int i = forgotten(threadIdx.x); i < Config::kTile * kUnits; i += Config::kThreads) {
      int const row = i / kUnits, column = i % kUnits * kColumns;
      if (row < rows && column < columns) {
        *reinterpret_cast<Unit*>(out + int64_t(row) * n_ + column) = Unit{};
      }
    }
  }

  typename Problem::Params const& params_;
  TriangularTile tile_;
  typename Problem::Stack const& stack_;
  int n_;
  Sum* staged_;
  Element* out_;
};

}  // namespace jgg::fp64
