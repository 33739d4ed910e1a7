// Turns the sums of many rows into results, 16 rows at a time, so that the kernel needs code for
// only 16 rows. Each warp transposes its 16 columns of these rows by itself, so that no warp waits
// for others.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "packed/epilogue.h"

namespace jgg::packed {

constexpr int kTurnedRows = 16;

// Two buffers for a warp's results, with two halves of 16 bytes for each row. In rows 4 to 7 of
// every 8, the halves are exchanged, so that writing a fragment uses every bank once.
struct TurnedRows {
  alignas(128) uint8_t of[2][kTurnedRows][2 * few_rows::kMmaColumns];
};

// Stores the sums of a consumer's two strips. Each warp has 16 columns of each strip. In the
// result, a warp's columns of the first strip begin at column `first` of the tile. If both strips
// are of one matrix, the warp's columns of the second strip begin kNextRun further on. The
// arithmetic has the same order as in few_rows/epilogue.h.
template <class Config>
class RowsEpilogue : Epilogue<Config> {
  using Base = Epilogue<Config>;
  static constexpr int kBlocks = kTurnedRows / few_rows::kMmaRows;
  // The results of two blocks of rows by two runs of eight columns. A register has a pair of rows,
  // as stmatrix needs it.
  using Words = uint32_t[2 * kBlocks];

 public:
  __device__ RowsEpilogue(Params const& params, WorkTile const& work, TurnedRows& turned, int first)
      : Base(params, work, first, nullptr), turned_(turned) {}

  // Loads what all rows share, and the weights of the first 16 rows.
  __device__ void read() {
    this->read_biases(bias_);
    if constexpr (Base::kHasScales) this->read_scales(scale_);
    weight_ = weight_of(lane() % kTurnedRows);
  }

  // `sum(strip, i)` is a thread's sum i of a strip, in WGMMA's order (see few_rows::Sums).
  template <int kAllBlocks, class Sum>
  __device__ void store(Sum const& sum) {
    int const rows = min(this->rows(), Config::kTileM);
#pragma unroll 1
    for (int first = 0; first < rows; first += kTurnedRows) {
      few_rows::Sums<kBlocks> sums;
      pick<0, kAllBlocks>(first / few_rows::kMmaRows, sum, sums);
      float const weight = weight_;
      // The next weights are loaded early, because they come from global memory.
      if (first + kTurnedRows < rows)
        weight_ = weight_of(first + kTurnedRows + lane() % kTurnedRows);
      store_rows(first, min(rows - first, kTurnedRows), sums, weight);
    }
  }

 private:
  static constexpr int kElements = 16 / sizeof(typename Config::Element);

  __device__ Params const& params() const { return this->packed_params(); }

  // Calls `function` with the form of the launch, as a constant, so that all activations of 16 rows
  // overlap.
  template <class Function>
  __device__ void with_form(Function const& function) const {
    auto const call = [&]<Form kForm>() { function(std::integral_constant<Form, kForm>{}); };
    if constexpr (Config::kHasUp) {
      if (params().form == Form::kPlain) return call.template operator()<Form::kPlain>();
      if (params().form == Form::kGated) return call.template operator()<Form::kGated>();
    } else {
      if (params().form == Form::kProduct) return call.template operator()<Form::kProduct>();
    }
    call.template operator()<Form::kGeneral>();
  }

  // Copies the sums of the rows from `block` on, which is one of kCount blocks from kFirst on.
  // Branches find the block, because selecting each sum among the sums of all rows takes eight
  // times as many instructions. `volatile` keeps the compiler from turning branches into
  // selections.
  template <int kFirst, int kCount, class Sum>
  __device__ static void pick(int block, Sum const& sum, few_rows::Sums<kBlocks>& sums) {
    if constexpr (kCount == kBlocks) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks * 4; ++i) {
        int const strip = i / (kBlocks * 4), at = i % (kBlocks * 4);
        asm volatile("mov.b32 %0, %1;"
                     : "=f"(sums[strip][at / 4][at % 4])
                     : "f"(sum(strip, kFirst * 4 + at)));
      }
    } else {
      constexpr int kHalf = kCount / kBlocks / 2 * kBlocks;
      if (block < kFirst + kHalf) {
        pick<kFirst, kHalf>(block, sum, sums);
      } else {
        pick<kFirst + kHalf, kCount - kHalf>(block, sum, sums);
      }
    }
  }

  __device__ static int lane() { return threadIdx.x % kWarpSize; }

  __device__ float weight_of(int row) const {
    return row < this->rows() ? params().template weight<false>(this->first_row() + row, nullptr)
                              : 0.0f;
  }

  // Stores up to 16 rows. Lane i has the weight of row i.
  __device__ void store_rows(int first, int rows, few_rows::Sums<kBlocks> const& sums,
                             float weight) {
    Words out[2], kept[2];
    with_form([&](auto form) { compute<form.value>(sums, weight, kept, out); });
    if (params().kept_gate) {
      write(params().kept_gate, 0, first, rows, kept[0]);
      if constexpr (!Config::kHasUp) write(params().kept_gate, 1, first, rows, kept[1]);
    }
    if constexpr (Config::kHasUp) {
      if (params().kept_up) write(params().kept_up, 0, first, rows, kept[1]);
    }
    write(params().out, 0, first, rows, out[0]);
    if constexpr (!Config::kHasUp) write(params().out, 1, first, rows, out[1]);
  }

  // Sets `kept` to gate and up, and `out` to the results.
  template <Form kForm>
  __device__ void compute(few_rows::Sums<kBlocks> const& sums, float weight, Words (&kept)[2],
                          Words (&out)[2]) const {
    constexpr bool kActivates = kForm != Form::kProduct;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float weights[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        int const row = block * few_rows::kMmaRows + few_rows::lane_row() + odd;
        weights[odd] = __shfl_sync(~0u, weight, row);
      }
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        int const word = 2 * block + high;
#pragma unroll
        for (int strip = 0; strip < 2; ++strip) {
          float const bias = bias_[strip][high];
          float x[2];
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            x[odd] = sums[strip][block][2 * high + odd];
            x[odd] *= Base::kHasScales ? scale_[strip][high] : Base::kFactor;
            x[odd] += kActivates ? bias : weights[odd] * bias;
          }
          kept[strip][word] = out[strip][word] = in_halves(x[0], x[1]);
        }
        if constexpr (kActivates) activate<kForm>(weights, kept, out, word);
      }
    }
  }

  template <Form kForm>
  __device__ void activate(float const (&weights)[2], Words const (&kept)[2], Words (&out)[2],
                           int word) const {
    auto const activated = [&](float gate, float up) {
      if constexpr (kForm == Form::kGeneral) {
        return mlp::gated(params().activation, gate, up);
      } else {
        return mlp::gated<kForm == Form::kPlain>(params().gated, gate, up);
      }
    };
    float y[2][2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      float const first = half(kept[0][word], odd), second = half(kept[1][word], odd);
      if constexpr (Config::kHasUp) {
        mlp::Gated const a = activated(first, second);
        y[0][odd] = a.activation * a.up * weights[odd];
      } else {
        y[0][odd] = activated(first, 0.0f).activation * weights[odd];
        y[1][odd] = activated(second, 0.0f).activation * weights[odd];
      }
    }
    out[0][word] = in_halves(y[0][0], y[0][1]);
    if constexpr (!Config::kHasUp) out[1][word] = in_halves(y[1][0], y[1][1]);
  }

  __device__ static uint32_t in_halves(float first, float second) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
  __device__ static float half(uint32_t word, int high) {
    return __uint_as_float(high ? word & 0xFFFF0000 : word << 16);
  }

  __device__ static int place(int row, int half) {
    return row * 2 * few_rows::kMmaColumns + (half ^ row / 4 % 2) * 16;
  }

  // Writes a warp's columns of `strip` of up to 16 rows. Calls alternate between two buffers, so
  // that one may be written while lanes still read the other.
  __device__ void write(void* result, int strip, int first, int rows, Words const& words) {
    uint8_t* const buffer = turned_.of[buffer_][0];
    buffer_ ^= 1;
    int const line = lane() % 8 + lane() / 16 * 8;
    auto& turned = *reinterpret_cast<cute::uint128_t*>(buffer + place(line, lane() / 8 % 2));
    __syncwarp();  // lanes may have left the last call at different times
    cute::SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3], turned);
    __syncwarp();
    // The compiler computes these once for all calls.
    int const row = lane() / 2, n = params().n;
    int const column = this->column(0, 0) - few_rows::lane_column() + lane() % 2 * kElements;
    int64_t const at = (int64_t(this->first_row()) + first + row) * n + column;
    int const next = strip * Config::kNextRun;
    if (row >= rows || column + next >= n) return;
    uint4 const four = *reinterpret_cast<uint4 const*>(buffer + place(row, lane() % 2));
    auto* const out = static_cast<uint16_t*>(result) + at + next;
    if (n % kElements == 0) {
      *reinterpret_cast<uint4*>(out) = four;
      return;
    }
    uint32_t const all[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (column + next + i < n) out[i] = static_cast<uint16_t>(all[i / 2] >> i % 2 * 16);
    }
  }

  TurnedRows& turned_;
  int buffer_ = 0;
  float weight_;
  float bias_[2][2];
  float scale_[2][2];
};

}  // namespace jgg::packed
