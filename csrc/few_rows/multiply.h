// Multiplies one tile. Columns of matrices are on the M side of the tensor cores' instruction,
// which is 16 wide. Rows are on its N side, which is 8 wide, so few rows cost little.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <type_traits>

#include "few_rows/config.h"
#include "scheduler/warp.h"

namespace jgg::few_rows {

constexpr int kMmaRows = 8;      // of x, on the N side
constexpr int kMmaColumns = 16;  // of a matrix, on the M side
constexpr int kMmaK = 16;

// A warp has two runs of 16 columns: the same 16 of gate and of up, or two runs of one matrix that
// are `Config::kNextRun` apart. For each run and each block of 8 rows, a thread has four sums. Sum
// i is of column lane / 4 + i / 2 * 8 and row lane % 4 * 2 + i % 2.
template <int kBlocks>
using Sums = float[2][kBlocks][4];

__device__ inline int lane_column() { return threadIdx.x % kWarpSize / 4; }
__device__ inline int lane_row() { return threadIdx.x % 4 * 2; }

template <class Element>
__device__ void multiply_add(float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  using Mma =
      std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                         cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Mma::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b0, b1, sums[0], sums[1],
           sums[2], sums[3]);
}

// Calls `function` with a number of blocks of eight rows, as a constant: the least of 1, 2, 4, ...
// kMost that has room for `rows`.
template <int kMost, int kBlocks = 1, class Function>
__device__ __forceinline__ void with_blocks(int rows, Function&& function) {
  if constexpr (kBlocks < kMost) {
    if (rows > kBlocks * kMmaRows) return with_blocks<kMost, kBlocks * 2>(rows, function);
  }
  function(std::integral_constant<int, kBlocks>{});
}

// The places in a stage from which a lane reads.
template <class Config>
struct Places {
  int column[2];  // of matrices, for the first 16 of K
  int row;        // of the first eight rows, for the first 32 of K

  __device__ Places(int warp, bool has_up) {
    int const lane = threadIdx.x % kWarpSize, k = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const first = (has_up ? warp : (warp * 2 + i) % 4) * kMmaColumns;
      int const box = has_up ? i : warp / 2;
      int const piece = first / 8 + lane / 8 % 2;
      column[i] = box * Config::kBoxBytes + k * kRowBytes + (piece ^ lane % 8) * 16;
    }
    row = lane % 8 * kRowBytes + (lane / 8 ^ lane % 8) * 16;
  }
};

// Adds the product with the first 8 * kBlocks rows of a tile to `sums`.
template <class Config, int kBlocks>
__device__ __forceinline__ void multiply(SharedStorage<Config>& shared, int steps,
                                         sm90::StageIterator<Config::kStages>& stage,
                                         Places<Config> const& places, Sums<kBlocks>& sums) {
  for (int step = 0; step < steps; ++step, ++stage) {
    shared.full[stage.stage].wait(stage.phase);
    uint8_t const* const matrices = shared.matrices[stage.stage];
    uint8_t const* const rows = shared.rows[stage.stage];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint8_t const* const at =
            rows + (places.row ^ half * (kRowBytes / 2)) + block * kMmaRows * kRowBytes;
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(at), b[block][0],
                                      b[block][1], b[block][2], b[block][3]);
      }
#pragma unroll
      for (int quarter = 0; quarter < 2; ++quarter) {
        int const k = (2 * half + quarter) * kMmaK;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          uint8_t const* const at = matrices + places.column[i] + k * kRowBytes;
          cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(at), a[0], a[1],
                                        a[2], a[3]);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            multiply_add<typename Config::Element>(sums[i][block], a, b[block][2 * quarter],
                                                   b[block][2 * quarter + 1]);
          }
        }
      }
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) shared.empty[stage.stage].arrive();
  }
}

}  // namespace jgg::few_rows
