// The epilogue of symmetric results in fine tiles. No next tile has products that would hide this
// epilogue, so it has to be short. Each warp stores the rows that it holds without waiting for
// other warps, and not by TMA, which takes a thousand cycles for a block.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "rank_k/rank_k.h"
#include "scheduler/warp.h"
#include "sm90/config.h"
#include "sm90/epilogue/scale_and_add.h"

namespace jgg::sm90 {

// With `kPlain`, there is no C and no diagonal to add, and the other triangle is zero. Otherwise
// the parameters decide this at run time.
template <class Problem, bool kPlain>
class FineEpilogue {
  using Config = typename Problem::Config;
  using Output = typename Config::Output;
  using Params = typename Problem::Params;

  static constexpr bool kPacks = sizeof(Output) == 2;
  static constexpr int kBlock = kRowsPerConsumer;
  static constexpr int kAccumulatorsPerBlock = kBlock * kBlock / kWarpgroup;
  // Elements in 16 bytes. A row of the result is a multiple of 16 bytes.
  static constexpr int kUnit = 16 / sizeof(Output);

 public:
  // Begins to read alpha and beta of the tile.
  __device__ FineEpilogue(SharedStorage<Config>& shared, Params const& params, WorkTile const& work,
                          int consumer)
      : params_(params), n_(work.extent) {
    auto const& descriptors = params.descriptors[work.group];
    int64_t const first = int64_t(work.batch) * n_ * n_;
    out_ = descriptors.out_data + first;
    c_ = descriptors.c_data + first;
    alpha_ = descriptors.alpha.at(work.batch);
    beta_ = !kPlain && params.adds_c ? descriptors.beta.at(work.batch) : 0.0f;
    diagonal_ = !kPlain && params.adds_diagonal ? descriptors.diagonal.at(work.batch) : 0.0f;
    staging_ = &shared.subtiles[consumer][0][0] + warp() * kStagingSlots * kStagingBytes;
  }

  // Writes zeros to the mirror images of `blocks` blocks of 64 rows. This does not need the results
  // of the blocks.
  __device__ void store_zeros(int row, int column, int blocks) const {
    if (other() != OtherTriangle::kZero) return;
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

  // Scales blocks of 64 rows, adds C, and stores the blocks and their mirror images.
  template <class Accumulators>
  __device__ void store(Accumulators& accumulators, int row, int column) const {
    constexpr int kBlocks = decltype(cute::size(accumulators))::value / kAccumulatorsPerBlock;
    if (row >= n_ || column >= n_) return;
    __syncwarp();  // lanes may still read what the last call staged
    Output const* const c = c_ + int64_t(row) * n_ + column;
    scale_and_add(accumulators, alpha_, beta_, c, n_, n_ - row, n_ - column);
    if (!kPlain && diagonal_ != 0.0f) add_on_diagonal(accumulators, diagonal_, row - column);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      auto const value = [&](int i) { return accumulators(block * kAccumulatorsPerBlock + i); };
      int const first = column + block * kBlock;
      if (first >= n_) break;
      if constexpr (kPacks) {
        store_block(value, block % kStagingSlots, row, first);
      } else if (row == first) {
        store_diagonal(value, row);
      } else {
        store_elements(value, row, first);
      }
    }
  }

 private:
  // A warp's 16 rows of a block of 16-bit results. Blocks alternate between two slots, so that a
  // warp waits for its lanes once per block.
  static constexpr int kWarpRows = 16;
  static constexpr int kStagingBytes = kWarpRows * kRowBytes;
  static constexpr int kStagingSlots = 2;
  static_assert(kWarpgroup / kWarpSize * kStagingSlots * kStagingBytes <=
                Config::kSubtileSlots * Config::kSubtileBytes);

  static constexpr int kBlockPairs = kBlock / 16;

  // Masks of the bits of each fragment of a diagonal block that are in the computed triangle.
  struct DiagonalMasks {
    bool lower;
    uint32_t edge;

    __device__ explicit DiagonalMasks(Uplo uplo) : lower(uplo == Uplo::kLower) {
      int const row = lane() / 4, column = lane() % 4 * 2;
      uint32_t const left = (lower ? column <= row : row <= column) ? 0x0000ffff : 0;
      uint32_t const right = (lower ? column < row : row <= column + 1) ? 0xffff0000 : 0;
      edge = left | right;
    }

    // Returns the mask of fragment i of the 16 columns with number `index`.
    __device__ uint32_t at(int index, int i) const {
      bool const on = index == warp();
      if (on && (i == 0 || i == 3)) return edge;
      bool const inside = on ? (i == 1) == lower : (index < warp()) == lower;
      return inside ? ~0u : 0;
    }
  };

  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int warp() { return threadIdx.x % kWarpgroup / kWarpSize; }

  __device__ Output* at(int row, int column) const { return out_ + int64_t(row) * n_ + column; }

  // A pair of neighbours in a row.
  using Pair = cutlass::AlignedArray<Output, 2>;
  template <class Value>
  __device__ static Pair pair(Value const& value, int i) {
    cutlass::NumericArrayConverter<Output, float, 2> const convert;
    auto const converted = convert({value(i), value(i + 1)});
    return reinterpret_cast<Pair const&>(converted);
  }

  // Sets `to` to the four stmatrix fragments, of 8 rows by 8 columns each, of the 16 columns with
  // number `index`.
  template <class Value>
  __device__ static void fragments(Value const& value, int index, uint32_t (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair const two = pair(value, (index * 4 + i) * 2);
      to[i] = reinterpret_cast<uint32_t const&>(two);
    }
  }

  // Copies units of 16 bytes that the warp has staged to the result. A staged row has `kPerRow`
  // units, and its first unit goes to column `column`. The first staged row goes to row `row`. Only
  // rows [first_row, end_row) and units [first_unit, end_unit) are copied.
  template <int kPerRow, class Address>
  __device__ void copy_out(Address address, int row, int column, int first_row, int end_row,
                           int first_unit, int end_unit) const {
    __syncwarp();
    constexpr int kRows = kWarpSize / kPerRow;
    int const unit = lane() % kPerRow, staged_row = lane() / kPerRow;
    bool const inside = unit >= first_unit && unit < end_unit && column + unit * kUnit < n_;
    end_row = min(end_row, n_ - row);
    Output* to = at(row + staged_row, column + unit * kUnit);
#pragma unroll
    for (int i = 0; i < kStagingBytes / 16 / kWarpSize; ++i) {
      int const current = staged_row + i * kRows;
      uint4 const staged = *reinterpret_cast<uint4 const*>(address(current, unit));
      if (inside && current >= first_row && current < end_row)
        *reinterpret_cast<uint4*>(to) = staged;
      to += int64_t(kRows) * n_;
    }
  }

  // Stores a block of 16-bit results and its mirror image. A block on the diagonal is its own
  // mirror image. This function fills the other triangle of such a block with zeros. If the other
  // triangle has no zeros, store_beside_others() stores the block.
  template <class Value>
  __device__ void store_block(Value const& value, int slot, int row, int column) const {
    bool const diagonal = row == column;
    uint8_t* const staging = staging_ + slot * kStagingBytes;
    DiagonalMasks const masks(params_.uplo);
    if (diagonal && other() != OtherTriangle::kZero) {
      return store_beside_others(value, masks, staging, row);
    }
#pragma unroll
    for (int index = 0; index < kBlockPairs; ++index) {
      uint32_t two[4];
      fragments(value, index, two);
      if (diagonal) {
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i] &= masks.at(index, i);
      }
      stage(two, index, staging);
    }
    copy_staged(staging, row, column, 0, kBlockPairs);
    if (other() == OtherTriangle::kMirrored) {
      __syncwarp();
      store_transposed(value, staging, row, column, 0, kBlock);
    }
  }

  // Stores a block on the diagonal whose other triangle is the mirror image of the computed one, or
  // C. Each square of 16 x 16 is in one triangle or on the diagonal. In a square on the diagonal,
  // each square of 8 x 8 is in one triangle or on the diagonal.
  template <class Value>
  __device__ void store_beside_others(Value const& value, DiagonalMasks const& masks,
                                      uint8_t* staging, int first) const {
    bool const mirrored = other() == OtherTriangle::kMirrored;
#pragma unroll
    for (int index = 0; index < kBlockPairs; ++index) {
      uint32_t two[4], beside[4] = {};
      fragments(value, index, two);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (mirrored) {
          cute::SM75_U32x1_MOVM_T::copy(two[i == 1 ? 2 : i == 2 ? 1 : i], beside[i]);
        } else {
          int const row = first + warp() * kWarpRows + i % 2 * 8 + lane() / 4;
          int const column = first + index * 16 + i / 2 * 8 + lane() % 4 * 2;
          if (row < n_ && column < n_) {
            beside[i] = *reinterpret_cast<uint32_t const*>(at(row, column));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t const mask = masks.at(index, i);
        two[i] = (two[i] & mask) | (beside[i] & ~mask);
      }
      stage(two, index, staging);
    }
    if (!mirrored) return copy_staged(staging, first, first, 0, kBlockPairs);
    // Elements of this warp's rows on the other side of the diagonal are mirror images of other
    // warps' elements, and the other warps store them.
    bool const lower = params_.uplo == Uplo::kLower;
    copy_staged(staging, first, first, lower ? 0 : warp(), lower ? warp() + 1 : kBlockPairs);
    __syncwarp();
    store_transposed(value, staging, first, first, lower ? 0 : (warp() + 1) * kWarpRows,
                     lower ? warp() * kWarpRows : kBlock);
  }

  // Stages the fragments of 16 columns. Units of the rows that a warp stages are swizzled, so that
  // neither the units of a row nor those of a column share banks.
  __device__ static void stage(uint32_t const (&two)[4], int index, uint8_t* staging) {
    cute::SM90_U32x4_STSM_N::copy(two[0], two[1], two[2], two[3],
                                  *reinterpret_cast<cute::uint128_t*>(
                                      swizzled(staging, lane() % 16, index * 2 + lane() / 16)));
  }

  // Copies columns [16 first, 16 end) of the warp's rows of a block.
  __device__ void copy_staged(uint8_t* staging, int row, int column, int first, int end) const {
    copy_out<kBlock / kUnit>([&](int row, int unit) { return swizzled(staging, row, unit); },
                             row + warp() * kWarpRows, column, 0, kWarpRows, first * 2, end * 2);
  }

  // Stores rows [first, end) of the mirror image of the warp's rows.
  template <class Value>
  __device__ void store_transposed(Value const& value, uint8_t* staging, int row, int column,
                                   int first, int end) const {
    constexpr int kPerRow = kWarpRows / kUnit;
    auto const address = [&](int row, int unit) {
      return staging + row * kPerRow * 16 + (unit ^ row / 4 % kPerRow) * 16;
    };
#pragma unroll
    for (int index = 0; index < kBlockPairs; ++index) {
      uint32_t two[4];
      fragments(value, index, two);
      cute::SM90_U16x8_STSM_T::copy(
          two[0], two[1], two[2], two[3],
          *reinterpret_cast<cute::uint128_t*>(
              address(index * 16 + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2)));
    }
    copy_out<kPerRow>(address, column, row + warp() * kWarpRows, first, end, 0, kPerRow);
    __syncwarp();
  }

  // Stores a block of 32-bit results off the diagonal, and its mirror image.
  template <class Value>
  __device__ void store_elements(Value const& value, int row, int column) const {
    each_pair([&](int i, int r, int c) {
      if (row + r >= n_ || column + c >= n_) return;
      Pair const two = pair(value, i);
      *reinterpret_cast<Pair*>(at(row + r, column + c)) = two;
      if (other() != OtherTriangle::kMirrored) return;
      for (int j = 0; j < 2; ++j) *at(column + c + j, row + r) = two[j];
    });
  }

  // Stores the block on the diagonal of 32-bit results.
  template <class Value>
  __device__ void store_diagonal(Value const& value, int first) const {
    bool const lower = params_.uplo == Uplo::kLower;
    each_pair([&](int i, int r, int c) {
      // Either both columns of a pair are in the matrix, or neither is.
      if (first + r >= n_ || first + c >= n_) return;
      Pair two = pair(value, i);
      bool const inside[] = {lower ? c <= r : r <= c, lower ? c + 1 <= r : r <= c + 1};
      Output* const to = at(first + r, first + c);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (inside[j] && other() == OtherTriangle::kMirrored && r != c + j) {
          *at(first + c + j, first + r) = two[j];
        }
        if (!inside[j]) two[j] = Output(0);
      }
      if (other() == OtherTriangle::kZero || (inside[0] && inside[1])) {
        *reinterpret_cast<Pair*>(to) = two;
      } else {
        if (inside[0]) to[0] = two[0];
        if (inside[1]) to[1] = two[1];
      }
    });
  }

  // Calls function(i, row, column) for every pair of this thread's accumulators of a block.
  template <class Function>
  __device__ static void each_pair(Function const& function) {
#pragma unroll
    for (int i = 0; i < kAccumulatorsPerBlock; i += 2) {
      function(i, accumulator_row(i), accumulator_column(i));
    }
  }

  __device__ OtherTriangle other() const { return kPlain ? OtherTriangle::kZero : params_.other; }

  Params const& params_;
  int n_;
  Output* out_;
  Output const* c_;
  float alpha_;
  float beta_;
  float diagonal_;
  uint8_t* staging_;
};

}  // namespace jgg::sm90
