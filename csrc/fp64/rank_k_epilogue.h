// The epilogue of symmetric results. Where an element and its mirror image are added, or both
// stored, a tile goes through shared memory, where both are found. Others leave registers for their
// place.
#pragma once

#include "fp64/direct_store.h"
#include "fp64/rank_k_problem.h"

namespace jgg::fp64 {

template <class Config>
class RankKEpilogue {
  using Problem = RankKProblem<Config>;
  using Element = typename Config::Element;
  using Sum = Value<Element>;
  static constexpr int kElements = Config::kTile * Config::kTile / Config::kThreads;

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

  __device__ Element& out_at(int row, int column) const { return out_[int64_t(row) * n_ + column]; }

  __device__ Sum beta() const { return params_.adds_c ? stack_.beta.at(tile_.matrix) : Sum{}; }

  __device__ Sum alpha() const {
    Sum const alpha = stack_.alpha.at(tile_.matrix);
    // What the sums were multiplied with when the second product began.
    bool const is_conjugated = params_.hermitian && params_.two_products && !tile_.diagonal;
    return is_conjugated ? conjugate(alpha) : alpha;
  }

  // With C to be read, a warp's elements are better next to each other.
  __device__ bool is_stored_directly() const {
    return !tile_.diagonal && params_.other != OtherTriangle::kMirrored && is_zero(beta());
  }

  // Elements that a thread works on at a time: accesses of a batch are under way together, and
  // what decides about them is asked once. Element by element, latencies add up to a quarter of the
  // time of a tile's products with k = 1024.
  static constexpr int kBatch = 8;
  static_assert(kElements % kBatch == 0);
  using Batch = Sum[kBatch];

  template <class Function>
  __device__ static void for_each(int batch, Function const& function) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      auto const [row, column] = place_of<Config>(batch + i);
      function(i, row, column);
    }
  }

  // Whether the rest of a tile on the diagonal is stored with its triangle.
  __device__ bool adds_zeros() const {
    return tile_.diagonal && params_.other == OtherTriangle::kZero;
  }

  // alpha * product + beta * C in the computed triangle. As in BLAS, C is not read where beta is
  // zero, nor is the imaginary part of a Hermitian diagonal.
  __device__ void store_computed() const {
    bool const adds_mirror = params_.two_products && tile_.diagonal;
    Sum const alpha = this->alpha(), beta = this->beta();
    bool const adds_c = !is_zero(beta);
    bool const is_real_diagonal = params_.hermitian && tile_.diagonal;
#pragma unroll 1
    for (int batch = 0; batch < kElements; batch += kBatch) {
      bool stored[kBatch];
      Element c[kBatch] = {};
      Batch values;
      for_each(batch, [&](int i, int row, int column) {
        stored[i] = is_stored(row, column);
        if (adds_c && stored[i]) c[i] = out_at(tile_.m + row, tile_.n + column);
      });
      for_each(batch,
               [&](int i, int row, int column) { values[i] = times(alpha, staged(row, column)); });
      if (adds_mirror) {
        for_each(batch, [&](int i, int row, int column) {
          Sum const image = stored[i] ? staged(column, row) : Sum{};
          values[i] = plus(values[i], flip(times(alpha, image)));
        });
      }
      if (adds_c) {
        for_each(batch,
                 [&](int i, int, int) { values[i] = plus(values[i], times(beta, widen(c[i]))); });
      }
      if (is_real_diagonal) {
        for_each(batch, [&](int i, int row, int column) {
          if (row == column) values[i] = real_part(values[i]);
        });
      }
      for_each(batch, [&](int i, int row, int column) {
        if (!stored[i] && !(adds_zeros() && is_inside(row, column))) return;
        out_at(tile_.m + row, tile_.n + column) = narrow<Element>(stored[i] ? values[i] : Sum{});
        // Nobody else reads it before the barrier: mirror images are not in the triangle.
        if (stored[i]) staged(row, column) = values[i];
      });
    }
  }

  __device__ bool is_inside(int row, int column) const {
    return tile_.m + row < n_ && tile_.n + column < n_;
  }

  __device__ bool is_stored(int row, int column) const {
    return is_inside(row, column) && is_computed(row, column);
  }

  // The mirror image: rows and columns of the tile exchange places.
  __device__ void store_mirror_image() const {
#pragma unroll 1
    for (int batch = 0; batch < kElements; batch += kBatch) {
      bool stored[kBatch];
      Batch values;
      for_each(batch, [&](int i, int row, int column) {
        stored[i] = tile_.n + row < n_ && tile_.m + column < n_ &&
                    !(tile_.diagonal && is_computed(row, column));
      });
      for_each(batch, [&](int i, int row, int column) { values[i] = flip(staged(column, row)); });
      for_each(batch, [&](int i, int row, int column) {
        if (stored[i]) out_at(tile_.n + row, tile_.m + column) = narrow<Element>(values[i]);
      });
    }
  }

  // In place of the mirror image of a tile that is not on the diagonal.
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
