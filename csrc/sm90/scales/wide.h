// Loads the scales of a tile if they lie in memory row by row, four steps at a time.
#pragma once

#include <cstdint>

#include "sm90/mainloop/scaled_config.h"
#include "types.h"

namespace jgg::sm90 {

// Returns one of four scales. An index that is not known at compile time would put them into local
// memory.
__device__ inline float of_step(float4 const& scales, int step) {
  float const low = step == 0 ? scales.x : scales.y, high = step == 2 ? scales.z : scales.w;
  return step < 2 ? low : high;
}

// If the scales of a row are contiguous, the scales of one step are far apart, each in another line
// of L1. Fetching the scales of a step keeps L1 busy for as many cycles as the tile has rows. L1 is
// shared memory, whose bandwidth WGMMA needs. Fetching the scales of four steps at once leaves a
// quarter of the accesses.
template <class Config>
class WideScales {
 public:
  static constexpr int kSteps = 4;

  // Returns whether scales can be loaded in this way: in every row of either operand they are
  // contiguous and start at a multiple of 16 bytes.
  static bool suit(RowScales const& lhs, BlockScales const& rhs) {
    auto const aligned = [](float const* data) {
      return reinterpret_cast<uintptr_t>(data) % (kSteps * sizeof(float)) == 0;
    };
    bool const lhs_suits = aligned(lhs.data) && lhs.block_stride == 1 &&
                           lhs.row_stride % kSteps == 0 && lhs.batch_stride % kSteps == 0;
    bool const rhs_suits = !rhs.data || rhs.block_stride == 0 ||
                           (aligned(rhs.data) && rhs.column_block_stride % kSteps == 0 &&
                            rhs.group_stride % kSteps == 0 && rhs.batch_stride % kSteps == 0);
    return lhs_suits && rhs_suits;
  }

  // `lhs` points to the scale of the tile's first row for step `first_step`. Rows past `last_row`
  // have no scales and get those of `last_row`. `rhs` points to the scale of this thread's block of
  // columns for step 0, or is null if the thread has no block or rhs has no scales.
  __device__ WideScales(float const* lhs, int stride, int last_row, float const* rhs,
                        bool rhs_has_steps, int first_step)
      : next_columns_(rhs && rhs_has_steps ? rhs + first_step : nullptr) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_rows_[i] = lhs + int64_t(min(thread() + i * kScaleThreads, last_row)) * stride;
    }
    float const scale = rhs ? __ldg(rhs) : 1.0f;
    columns_ = {scale, scale, scale, scale};
  }

  // Fetches the scales of the next four K tiles.
  __device__ void fetch() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows_[i] = four(next_rows_[i]);
    if (next_columns_) columns_ = four(next_columns_);
  }

  // Stores the scales of one of the four K tiles.
  __device__ void store(int step, float* to_lhs, float* to_rhs) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int const row = thread() + i * kScaleThreads;
      if (row < Config::kTileM) to_lhs[row] = of_step(rows_[i], step);
    }
    if (thread() < Config::kRhsScales) to_rhs[thread()] = of_step(columns_, step);
  }

 private:
  static constexpr int kRows = (Config::kTileM + kScaleThreads - 1) / kScaleThreads;

  __device__ static int thread() { return threadIdx.x % kScaleThreads; }

  __device__ static float4 four(float const*& next) {
    float4 const scales = __ldg(reinterpret_cast<float4 const*>(next));
    next += kSteps;
    return scales;
  }

  float const* next_rows_[kRows];  // every kScaleThreads-th row from this thread's first row on
  float const* next_columns_;
  float4 rows_[kRows];
  float4 columns_;
};

}  // namespace jgg::sm90
