// One tile's product: columns of matrices are on the M side of the tensor cores' instruction, which
// comes in 16, and rows on its N side, which comes in 8. So few rows cost little.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <type_traits>

#include "few_rows/config.h"
#include "scheduler/warp.h"

namespace jgg::few_rows {

constexpr int kMmaRows = 8;      // of x, on the N side
constexpr int kMmaColumns = 16;  // of a matrix, on the M side

// A warp has two runs of 16 columns: of gate and of up the same, or two that follow each other.
// Element i of a thread's four of 16 columns by 8 rows is that of column lane / 4 + i / 2 * 8 and
// row lane % 4 * 2 + i % 2.
template <int kBlocks>
using Sums = float[2][kBlocks][4];

__device__ inline int lane_column() { return threadIdx.x % kWarpSize / 4; }
__device__ inline int lane_row() { return threadIdx.x % 4 * 2; }

// The box that one of a warp's runs is in, and its first column there.
template <class Config>
struct Run {
  int box;
  int column;

  __device__ Run(int warp, int i)
      : box(Config::kHasUp ? i : warp / 2),
        column(Config::kHasUp ? warp * kMmaColumns : (warp * 2 + i) % 4 * kMmaColumns) {}
};

// Calls `function` with the least of 1, 2, 4, ... that, times kEach, has room for `rows` of kMost,
// as a constant.
template <int kEach, int kMost, int kCount = 1, class Function>
__device__ __forceinline__ void with_room_for(int rows, Function&& function) {
  if constexpr (kCount * kEach < kMost) {
    if (rows > kCount * kEach) return with_room_for<kEach, kMost, kCount * 2>(rows, function);
  }
  function(std::integral_constant<int, kCount>{});
}

// One half of a stage's K of kBlocks eights of rows, four registers of 16 bytes of K each.
// `place` is where the lane reads of the first eight, in the first half.
template <int kBlocks>
__device__ __forceinline__ void load_halves(uint8_t const* rows, int place, int half,
                                            uint32_t (&b)[kBlocks][4]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint8_t const* const at =
        rows + (place ^ half * (kRowBytes / 2)) + block * kMmaRows * kRowBytes;
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(at), b[block][0],
                                  b[block][1], b[block][2], b[block][3]);
  }
}

// Adds the product of a tile with the first kBlocks eights of its rows.
template <class Operands, int kBlocks>
__device__ __forceinline__ void multiply(typename Operands::Shared& shared, int steps,
                                         typename Operands::Stage& stage,
                                         typename Operands::Places const& places,
                                         Sums<kBlocks>& sums) {
  for (int step = 0; step < steps; ++step, ++stage) {
    shared.full[stage.stage].wait(stage.phase);
    Operands::template add<kBlocks>(shared, stage.stage, places, sums);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) shared.empty[stage.stage].arrive();
  }
}

}  // namespace jgg::few_rows
