// Turns the sums of many rows into results. Sums are rounded and transposed through shared memory,
// because a thread of WGMMA has single columns, and results are written in runs of columns.
//
// If tiles have few rows, a warp turns its own rounded sums into results, 16 rows at a time, so
// that no warp waits for others. If tiles have many rows, a separate warpgroup of epilogue warps
// does this while the consumers multiply the next tile.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "packed/epilogue.h"
#include "packed/results.h"

namespace jgg::packed {

constexpr int kRoundedRows = 16;  // that stmatrix writes at once

// Places in shared memory for the rounded sums of 16 rows of a warp's two strips, of which the warp
// has 16 columns. In rows 4 to 7 of every 8, the halves of a row are exchanged, so that writing a
// fragment uses every bank once.
struct RoundedRows {
  alignas(128) uint8_t of[2][kRoundedRows][2 * few_rows::kMmaColumns];

  __device__ uint8_t* piece(int strip, int row, int number) {
    return of[strip][row] + (number ^ row / 4 % 2) * 16;
  }
};

// Consumers write the rounded sums of a tile of many rows here, and the epilogue warps
// write scales, biases and weights of rows. The pieces of 16 bytes of a row are swizzled, so that
// writing a fragment and reading a row use every bank once.
template <class Config>
struct RoundedTile {
  alignas(128) uint8_t of[Config::kStrips][Config::kTileM][2 * kSide];
  float scale[Config::kStrips * kSide];  // of columns
  float bias[Config::kStrips * kSide];
  float weight[Config::kHasUp ? 1 : Config::kTileM];  // of rows, multiplies biases
  alignas(8) sm90::Barrier ready;  // scales, biases and weights are there, and sums may be written
  alignas(8) sm90::Barrier full;

  __device__ uint8_t* piece(int strip, int row, int number) {
    return of[strip][row] + (number ^ row % 8) * 16;
  }
};

// A lane's part of rounding: the scales and biases of its columns of a consumer's strips.
template <class Config>
struct Rounding {
  static constexpr int kStrips = Config::kOwnStrips;
  float scale[kStrips][2];
  float bias[kStrips][2];

  // Return where a lane writes with stmatrix: the row, and which of two pieces of 16 bytes.
  __device__ static int row() { return threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8; }
  __device__ static int piece() { return threadIdx.x / 8 % 2; }

  // Rounds the sums of 16 rows, and writes them to the lane's lines of all strips. `sum(strip, i)`
  // is the lane's sum i of these rows, in the order of few_rows::Sums. `weight(row)` is of one of
  // the rows, and multiplies biases. If there is an up, biases have no weights.
  template <class Sum, class Weight>
  __device__ void round(uint8_t* const (&lines)[kStrips], Sum const& sum,
                        Weight const& weight) const {
    float weights[4];
    if constexpr (!Config::kHasUp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[i] = weight(i / 2 * few_rows::kMmaRows + few_rows::lane_row() + i % 2);
      }
    }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      // A register has a pair of rows, as stmatrix needs it.
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        int const block = word / 2, high = word % 2;
        float x[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float added = bias[strip][high];
          if constexpr (!Config::kHasUp) added *= weights[2 * block + odd];
          x[odd] = fmaf(sum(strip, 4 * block + 2 * high + odd), scale[strip][high], added);
        }
        words[word] = rounded_pair(x[0], x[1]);
      }
      cute::SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3],
                                    *reinterpret_cast<cute::uint128_t*>(lines[strip]));
    }
  }
};

// The epilogue of a warp that multiplies a tile of few rows. The warp has 16 columns of each of its
// consumer's two strips. If both strips are of one matrix, the columns of the second begin kNextRun
// further on.
template <class Config, int kRows>
class FewRowsEpilogue : Epilogue<Config> {
  using Base = Epilogue<Config>;
  static_assert(kRows <= 2 * kRoundedRows && kRows <= kWarpSize);

 public:
  // The warp's columns begin at column `first` of the tile.
  __device__ FewRowsEpilogue(Params const& params, WorkTile const& work, int first)
      : Base(params, work, first, nullptr), results_(params, work) {}

  // Loads the scales and biases of the warp's columns, and the weights of rows.
  __device__ void read() {
    this->read_biases(rounding_.bias);
    this->read_scales(rounding_.scale);
    weight_ = results_.weight(lane());
  }

  // `sum(strip, i)` is a thread's sum i of a strip, in WGMMA's order (see few_rows::Sums).
  template <class Sum>
  __device__ void store(Sum const& sum, RoundedRows& rounded) const {
    int const line = rounding_.row(), at = rounding_.piece();
    uint8_t* const lines[] = {rounded.piece(0, line, at), rounded.piece(1, line, at)};
#pragma unroll 1
    for (int first = 0; first < results_.rows(); first += kRoundedRows) {
      auto const weight = [&](int row) {
        float const of_row = __shfl_sync(~0u, weight_, first + row);
        return this->params().has_activation ? 1.0f : of_row;
      };
      __syncwarp();  // lanes may still read the previous rows
      if (kRows == kRoundedRows || first == 0) {
        rounding_.round(lines, sum, weight);
      } else {
        constexpr int kBefore = kRoundedRows / 2;
        rounding_.round(lines, [&](int strip, int i) { return sum(strip, kBefore + i); }, weight);
      }
      __syncwarp();
      finish(first, rounded);
    }
  }

 private:
  __device__ static int lane() { return threadIdx.x % kWarpSize; }

  __device__ void finish(int first, RoundedRows& rounded) const {
    int const row = lane() / 2, piece = lane() % 2;
    auto const of = [&](int strip) -> uint4 const& {
      return *reinterpret_cast<uint4 const*>(rounded.piece(strip, row, piece));
    };
    float const weight = __shfl_sync(~0u, weight_, first + row);
    int const column = this->column(0, 0) - few_rows::lane_column() + piece * results_.kElements;
    with_form<Config>(this->params(), [&](auto form) {
      results_.template store<form.value>(first + row, column, weight, of(0), of(1));
      if constexpr (!Config::kHasUp) {
        results_.template store<form.value>(first + row, column + Config::kNextRun, weight, of(1),
                                            of(1));
      }
    });
  }

  Results<Config> results_;
  Rounding<Config> rounding_;
  float weight_;  // of row lane()
};

// The end of a tile of many rows for a warp that multiplies, which keeps nothing of the epilogue in
// registers until then.
template <class Config, int kRows, class Sum>
__device__ void round_tile(Sum const& sum, RoundedTile<Config>& tile, int consumer,
                           unsigned phase) {
  int const warp = threadIdx.x % sm90::kWarpgroup / kWarpSize;
  constexpr int kStrips = Config::kOwnStrips;
  Rounding<Config> rounding;
  tile.ready.wait(phase);
  uint8_t* lines[kStrips];
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    int const strip = kStrips * consumer + i;
    lines[i] = tile.piece(strip, rounding.row(), 2 * warp + rounding.piece());
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      int const column = warp * few_rows::kMmaColumns + few_rows::lane_column() + 8 * high;
      rounding.scale[i][high] = tile.scale[strip * kSide + column];
      rounding.bias[i][high] = tile.bias[strip * kSide + column];
    }
  }
#pragma unroll
  for (int first = 0; first < kRows; first += kRoundedRows) {
    rounding.round(
        lines, [&](int strip, int i) { return sum(strip, first / 2 + i); },
        [&](int row) { return tile.weight[first + row]; });
#pragma unroll
    for (int i = 0; i < kStrips; ++i) lines[i] += sizeof(tile.of[0][0]) * kRoundedRows;
  }
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) tile.full.arrive();
}

// The epilogue of a tile of many rows. Each of the four epilogue warps has four of every 16 rows.
template <class Config>
class ManyRowsEpilogue : Epilogue<Config> {
  using Base = Epilogue<Config>;
  static constexpr int kMatrices = Config::kHasUp ? 2 : 1;
  static constexpr int kPieces = 8, kRowsAtOnce = kWarpSize / kPieces, kRowsOfWarps = 16;

 public:
  static constexpr int kWarps = kRowsOfWarps / kRowsAtOnce;
  static_assert(kWarps * kWarpSize == sm90::kWarpgroup);
  static constexpr int kWeights = Config::kTileM > sm90::kWarpgroup ? 2 : 1;  // of a lane's rows

  __device__ ManyRowsEpilogue(Params const& params, WorkTile const& work)
      : Base(params, work, 0, nullptr), results_(params, work), first_column_(work.n) {}

  // Loads the scales, biases and weights for the consumers' rounding. Consumers have read those of
  // the previous tile, because store() waited for them.
  __device__ void prepare(RoundedTile<Config>& tile) {
    for (int i = threadIdx.x % sm90::kWarpgroup; i < Config::kStrips * kSide;
         i += sm90::kWarpgroup) {
      int const strip = i / kSide, column = column_of(strip) + i % kSide;
      bool const is_up = strip % kMatrices > 0;
      tile.scale[i] = this->scale_of(is_up, column);
      tile.bias[i] = this->bias_of(is_up, column);
    }
    static_assert(Config::kTileM == kWeights * sm90::kWarpgroup);
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      int const row = i * sm90::kWarpgroup + lane() / kRowsAtOnce * kRowsOfWarps +
                      first_row_of_warp() + lane() % kRowsAtOnce;
      weights_[i] = results_.weight(row);
      if constexpr (!Config::kHasUp) {
        tile.weight[row] = this->params().has_activation ? 1.0f : weights_[i];
      }
    }
    __syncwarp();
    if (lane() == 0) tile.ready.arrive();
  }

  __device__ void store(RoundedTile<Config>& tile, unsigned phase) const {
    tile.full.wait(phase);
    with_form<Config>(this->params(), [&](auto form) {
      int const rows = results_.rows(), piece = lane() % kPieces;
#pragma unroll 1
      for (int begin = 0; begin < rows; begin += kRowsOfWarps) {
        int const row = begin + first_row_of_warp() + lane() / kPieces;
        int const of_lane = begin / kRowsOfWarps * kRowsAtOnce + lane() / kPieces;
        float const own = of_lane < kWarpSize ? weights_[0] : weights_[kWeights - 1];
        float const weight = __shfl_sync(~0u, own, of_lane % kWarpSize);
#pragma unroll 1
        for (int strip = 0; strip < Config::kStrips; strip += kMatrices) {
          auto const of = [&](int matrix) -> uint4 const& {
            return *reinterpret_cast<uint4 const*>(tile.piece(strip + matrix, row, piece));
          };
          int const column = column_of(strip) + piece * results_.kElements;
          results_.template store<form.value>(row, column, weight, of(0), of(kMatrices - 1));
        }
      }
    });
  }

 private:
  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int first_row_of_warp() {
    return threadIdx.x % sm90::kWarpgroup / kWarpSize * kRowsAtOnce;
  }
  __device__ int column_of(int strip) const { return first_column_ + strip / kMatrices * kSide; }

  Results<Config> results_;
  int first_column_;
  float weights_[kWeights];
};

}  // namespace jgg::packed
