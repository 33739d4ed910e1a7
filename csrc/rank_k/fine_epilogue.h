// The epilogue of symmetric results in fine tiles. There is no next tile whose products would hide
// it, so what counts is how soon it ends: warps store what they hold on their own, without barriers
// between them, and not by TMA, which takes a thousand cycles for a block.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90.hpp>

#include "rank_k/rank_k.h"
#include "scheduler/warp.h"
#include "sm90/kernel_config.h"
#include "sm90/scale_and_add.h"

namespace jgg::sm90 {

template <class Problem>
class FineEpilogue {
  using Config = typename Problem::Config;
  using Output = typename Config::Output;
  using Params = typename Problem::Params;

  static constexpr bool kPacks = sizeof(Output) == 2;
  static constexpr int kBlock = kRowsPerConsumer;
  static constexpr int kAccumulatorsPerBlock = kBlock * kBlock / kWarpgroup;
  // Elements of 16 bytes: rows of results are a multiple of them.
  static constexpr int kUnit = 16 / sizeof(Output);

 public:
  // Of one tile, whose alpha and beta this begins to read.
  __device__ FineEpilogue(SharedStorage<Config>& shared, Params const& params, WorkTile const& work,
                          int consumer)
      : params_(params), n_(work.extent) {
    auto const& descriptors = params.descriptors[work.group];
    out_ = descriptors.out_data + int64_t(work.batch) * n_ * n_;
    alpha_ = descriptors.alpha.at(work.batch);
    beta_ = params.adds_c ? descriptors.beta.at(work.batch) : 0.0f;
    staging_ = &shared.chunks[consumer][0][0] + warp() * kStagingBytes;
  }

  // Writes the zeros across the diagonal from so many blocks of 64 rows. No result has to wait for
  // them.
  __device__ void store_zeros(int row, int column, int blocks) const {
    if (params_.other != OtherTriangle::kZero) return;
    constexpr int kUnits = kBlock / kUnit, kRows = kWarpgroup / kUnits;
    int const thread = threadIdx.x % kWarpgroup;
    int const to_column = row + thread % kUnits * kUnit;
    if (to_column >= n_) return;
    for (int block = 0; block < blocks; ++block, column += kBlock) {
      if (row == column) continue;
#pragma unroll
      for (int i = 0; i < kBlock; i += kRows) {
        int const to_row = column + i + thread / kUnits;
        if (to_row < n_) *reinterpret_cast<uint4*>(at(to_row, to_column)) = uint4{};
      }
    }
  }

  // Scales the blocks of 64 rows, adds C and stores them, and their mirror images.
  template <class Accumulators>
  __device__ void store(Accumulators& accumulators, int row, int column) const {
    constexpr int kBlocks = decltype(cute::size(accumulators))::value / kAccumulatorsPerBlock;
    if (row >= n_ || column >= n_) return;
    scale_and_add(accumulators, alpha_, beta_, at(row, column), n_, n_ - row, n_ - column);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      auto const value = [&](int i) { return accumulators(block * kAccumulatorsPerBlock + i); };
      int const first = column + block * kBlock;
      if (first >= n_) break;
      if (row == first) {
        store_diagonal(value, row);
      } else {
        store_block(value, row, first);
        if (params_.other == OtherTriangle::kMirrored) store_transposed(value, row, first);
      }
    }
  }

 private:
  // A warp's 16 rows of a block of 16-bit results.
  static constexpr int kWarpRows = 16;
  static constexpr int kStagingBytes = kWarpRows * kRowBytes;

  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int warp() { return threadIdx.x % kWarpgroup / kWarpSize; }

  __device__ Output* at(int row, int column) const { return out_ + int64_t(row) * n_ + column; }

  // Two neighbours in a row.
  using Pair = cutlass::AlignedArray<Output, 2>;
  template <class Value>
  __device__ static Pair pair(Value const& value, int i) {
    cutlass::NumericArrayConverter<Output, float, 2> const convert;
    auto const converted = convert({value(i), value(i + 1)});
    return reinterpret_cast<Pair const&>(converted);
  }

  // Fragments of stmatrix: four of 8 rows by 8 columns.
  template <class Value>
  __device__ static void fragments(Value const& value, int index, uint32_t (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair const two = pair(value, (index * 4 + i) * 2);
      to[i] = reinterpret_cast<uint32_t const&>(two);
    }
  }

  // Copies units of 16 bytes that the warp has staged, `kPerRow` to a row, to (row, column) on.
  template <int kPerRow, class Address>
  __device__ void copy_out(Address address, int row, int column) const {
    __syncwarp();
    int const to_column = column + lane() % kPerRow * kUnit;
#pragma unroll
    for (int i = 0; i < kStagingBytes / 16 / kWarpSize; ++i) {
      int const staged_row = i * (kWarpSize / kPerRow) + lane() / kPerRow;
      uint4 const unit = *reinterpret_cast<uint4 const*>(address(staged_row, lane() % kPerRow));
      if (row + staged_row < n_ && to_column < n_) {
        *reinterpret_cast<uint4*>(at(row + staged_row, to_column)) = unit;
      }
    }
    __syncwarp();
  }

  template <class Value>
  __device__ void store_block(Value const& value, int row, int column) const {
    if constexpr (kPacks) {
      // Units are permuted, so that neither rows nor columns of them share banks.
      auto const address = [&](int row, int unit) {
        return staging_ + row * kRowBytes + (unit ^ row % 8) * 16;
      };
#pragma unroll
      for (int index = 0; index < kBlock / 16; ++index) {
        uint32_t two[4];
        fragments(value, index, two);
        cute::SM90_U32x4_STSM_N::copy(
            two[0], two[1], two[2], two[3],
            *reinterpret_cast<cute::uint128_t*>(address(lane() % 16, index * 2 + lane() / 16)));
      }
      copy_out<kBlock / kUnit>(address, row + warp() * kWarpRows, column);
    } else {
      each_pair([&](int i, int r, int c) {
        if (row + r < n_ && column + c < n_) {
          *reinterpret_cast<Pair*>(at(row + r, column + c)) = pair(value, i);
        }
      });
    }
  }

  template <class Value>
  __device__ void store_transposed(Value const& value, int row, int column) const {
    if constexpr (kPacks) {
      constexpr int kPerRow = kWarpRows / kUnit;
      auto const address = [&](int row, int unit) {
        return staging_ + row * kPerRow * 16 + (unit ^ row / 4 % kPerRow) * 16;
      };
#pragma unroll
      for (int index = 0; index < kBlock / 16; ++index) {
        uint32_t two[4];
        fragments(value, index, two);
        cute::SM90_U16x8_STSM_T::copy(
            two[0], two[1], two[2], two[3],
            *reinterpret_cast<cute::uint128_t*>(
                address(index * 16 + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2)));
      }
      copy_out<kPerRow>(address, column, row + warp() * kWarpRows);
    } else {
      each_pair([&](int i, int r, int c) {
        Pair const two = pair(value, i);
        for (int j = 0; j < 2; ++j) {
          if (row + r < n_ && column + c + j < n_) *at(column + c + j, row + r) = two[j];
        }
      });
    }
  }

  // The block on the diagonal: what is in the computed triangle, and beside it its mirror image or
  // zeros. What C has there stays.
  template <class Value>
  __device__ void store_diagonal(Value const& value, int first) const {
    bool const lower = params_.uplo == Uplo::kLower;
    each_pair([&](int i, int r, int c) {
      // Both columns are inside, or both outside.
      if (first + r >= n_ || first + c >= n_) return;
      Pair two = pair(value, i);
      bool const inside[] = {lower ? c <= r : r <= c, lower ? c + 1 <= r : r <= c + 1};
      Output* const to = at(first + r, first + c);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (inside[j] && params_.other == OtherTriangle::kMirrored && r != c + j) {
          *at(first + c + j, first + r) = two[j];
        }
        if (!inside[j]) two[j] = Output(0);
      }
      if (params_.other == OtherTriangle::kZero || (inside[0] && inside[1])) {
        *reinterpret_cast<Pair*>(to) = two;
      } else {
        if (inside[0]) to[0] = two[0];
        if (inside[1]) to[1] = two[1];
      }
    });
  }

  // function(i, row, column) for every pair of this thread's accumulators of a block.
  template <class Function>
  __device__ static void each_pair(Function const& function) {
#pragma unroll
    for (int i = 0; i < kAccumulatorsPerBlock; i += 2) {
      function(i, accumulator_row(i), accumulator_column(i));
    }
  }

  Params const& params_;
  int n_;
  Output* out_;
  float alpha_;
  float beta_;
  uint8_t* staging_;
};

}  // namespace jgg::sm90
