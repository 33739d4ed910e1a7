// Turns the sums of many rows into results. The sums pass through shared memory a few rows at a
// time, so that the kernel contains the code that computes results only once, and results are
// stored in whole rows of 128 bytes.
#pragma once

#include "few_rows/multiply.h"
#include "packed/loads.h"

namespace jgg::packed {

constexpr int kSumsPitch = kSide + 4;  // floats, so that a warp's writes are to all banks

// The sums of a consumer, of both strips and so many rows.
template <int kRowsAtOnce>
struct RowsOfSums {
  alignas(16) float of[2][kRowsAtOnce][kSumsPitch];
};

// Stores the sums of a consumer's two strips. In the result the first strip begins at `column` and,
// if both are of one matrix, the second one kNextRun further on. The order of arithmetic is that of
// few_rows/epilogue.h.
template <class Config>
class RowsEpilogue {
  static constexpr int kColumns = 4;  // of a thread, next to each other
  static constexpr int kThreadsARow = kSide / kColumns;
  static constexpr int kRowsAtOnce = Config::kRowsAtOnce;
  using Sums = RowsOfSums<kRowsAtOnce>;

 public:
  __device__ RowsEpilogue(Params const& params, WorkTile const& work, Sums& sums, int column,
                          int consumer)
      : params_(params), work_(work), sums_(sums), column_(column), consumer_(consumer) {}

  // `sum(strip, i)` is a thread's sum i of a strip, as WGMMA leaves them: see few_rows::Sums.
  template <int kBlocks, class Sum>
  __device__ void store(Sum const& sum) const {
    constexpr int kBlocksAtOnce = kRowsAtOnce / few_rows::kMmaRows;
    constexpr int kNext = sm90::kWarpgroup / kThreadsARow, kOwn = kRowsAtOnce / kNext;
    int const rows = min(work_.extent - work_.m, Config::kTileM);
    int const thread = threadIdx.x % sm90::kWarpgroup, piece = thread % kThreadsARow * kColumns;
    Columns const gate(params_, work_, params_.gate, params_.gate_bias, column_ + piece);
    Columns const second = Config::kHasUp
                               ? Columns(params_, work_, params_.up, params_.up_bias, gate.column)
                               : Columns(params_, work_, params_.gate, params_.gate_bias,
                                         gate.column + Config::kNextRun);
#pragma unroll 1
    for (int first = 0; first < rows; first += kRowsAtOnce) {
      // They come from far.
      float weights[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        int const row = first + thread / kThreadsARow + i * kNext;
        weights[i] = row < rows ? params_.weight(work_.begin + work_.m + row) : 0.0f;
      }
      sm90::sync_consumer(consumer_);
#pragma unroll
      for (int block = 0; block < kBlocks; block += kBlocksAtOnce) {
        if (block * few_rows::kMmaRows != first) continue;
#pragma unroll
        for (int i = 0; i < 2 * kBlocksAtOnce * 4; ++i) {
          int const strip = i / (kBlocksAtOnce * 4), at = i % (kBlocksAtOnce * 4);
          write(strip, at, sum(strip, block * 4 + at));
        }
      }
      sm90::sync_consumer(consumer_);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        int const row = thread / kThreadsARow + i * kNext;
        if (first + row < rows) store_row(first + row, weights[i], piece, gate, second);
      }
    }
  }

 private:
  // The terms of a thread's columns of a matrix, for all rows.
  struct Columns {
    __device__ Columns(Params const& params, WorkTile const& work, Matrices const& matrices,
                       mlp::Bias const& biases, int column)
        : column(column), scale{1.0f, 1.0f, 1.0f, 1.0f}, bias{} {
      if (column >= params.n) return;
      // Scales are there for all columns of a strip.
      if (Config::kFormat != Format::kInt4) {
        scale = __ldg(reinterpret_cast<float4 const*>(
            matrices.channel_scales + int64_t(work.group) * params.strips() * kSide + column));
      }
      if (biases.data == nullptr) return;
      int64_t const first = int64_t(work.group) * params.n + column;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        int64_t const at = first + (column + i < params.n ? i : 0);
        if (biases.is_float32) {
          bias[i] = __ldg(static_cast<float const*>(biases.data) + at);
        } else {
          unsigned const bits = __ldg(static_cast<uint16_t const*>(biases.data) + at);
          bias[i] = __uint_as_float(bits << 16);
        }
      }
    }

    int column;
    float4 scale;
    float bias[kColumns];
  };

  __device__ void write(int strip, int i, float sum) const {
    int const warp = threadIdx.x % sm90::kWarpgroup / kWarpSize;
    int const row = i / 4 * few_rows::kMmaRows + few_rows::lane_row() + i % 2;
    int const column = warp * few_rows::kMmaColumns + few_rows::lane_column() + i / 2 % 2 * 8;
    sums_.of[strip][row][column] = sum;
  }

  // A thread's columns of a row.
  __device__ void store_row(int row, float weight, int piece, Columns const& gate,
                            Columns const& second) const {
    int const at = work_.begin + work_.m + row;
    float x[kColumns], y[kColumns];
    read(0, row, piece, gate, x);
    read(1, row, piece, second, y);
    if constexpr (Config::kHasUp) {
      store_columns(at, weight, gate, x, second, y);
    } else {
      store_columns(at, weight, gate, x, gate, x);
      store_columns(at, weight, second, y, second, y);
    }
  }

  // Sums times the scales of their columns.
  __device__ void read(int strip, int row, int piece, Columns const& columns,
                       float (&sums)[kColumns]) const {
    float4 const four =
        *reinterpret_cast<float4 const*>(&sums_.of[strip][row % kRowsAtOnce][piece]);
    sums[0] = four.x * columns.scale.x;
    sums[1] = four.y * columns.scale.y;
    sums[2] = four.z * columns.scale.z;
    sums[3] = four.w * columns.scale.w;
  }

  __device__ static float rounded(float x) {
    return static_cast<float>(static_cast<cutlass::bfloat16_t>(x));
  }

  __device__ void store_columns(int64_t row, float weight, Columns const& of_gate,
                                float (&gate)[kColumns], Columns const& of_up,
                                float (&up)[kColumns]) const {
    int const column = of_gate.column;
    if (column >= params_.n) return;
    if (!params_.has_activation) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) gate[i] += weight * of_gate.bias[i];
      return write_columns(params_.out, row, column, gate);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      gate[i] = rounded(gate[i] + of_gate.bias[i]);
      if constexpr (Config::kHasUp) up[i] = rounded(up[i] + of_up.bias[i]);
    }
    if (params_.kept_gate) write_columns(params_.kept_gate, row, column, gate);
    if (Config::kHasUp && params_.kept_up) write_columns(params_.kept_up, row, column, up);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      mlp::Gated const a = mlp::gated(params_.activation, gate[i], Config::kHasUp ? up[i] : 0.0f);
      gate[i] = Config::kHasUp ? a.activation * a.up * weight : a.activation * weight;
    }
    write_columns(params_.out, row, column, gate);
  }

  __device__ void write_columns(void* to, int64_t row, int column,
                                float const (&x)[kColumns]) const {
    auto* const at = static_cast<uint16_t*>(to) + row * params_.n + column;
    uint32_t words[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    }
    if (params_.n % kColumns == 0) {
      *reinterpret_cast<uint2*>(at) = {words[0], words[1]};
      return;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i < params_.n) at[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
    }
  }

  Params const& params_;
  WorkTile const& work_;
  Sums& sums_;
  int column_;
  int consumer_;
};

}  // namespace jgg::packed
