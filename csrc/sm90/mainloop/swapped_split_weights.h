// How weights come to the tensor cores: each thread reads its own weights from a stage, and splits
// them in registers.
#pragma once

#include "sm90/mainloop/swapped_split_config.h"

namespace jgg::sm90 {

// A thread's weights for one WGMMA: four elements of K of each of two columns. A warp has 16
// columns. swapped_split_rows.h says which elements these are.
struct Weights {
  float4 of_column[2];
};

template <class Config>
__device__ __forceinline__ Weights read_weights(uint8_t const* stage, int consumer, int k_block) {
  int const warp = threadIdx.x % kWarpgroup / kWarpSize, t = threadIdx.x % 4;
  int const first = consumer * kColumnsPerConsumer + warp * 16 + column_of_lane();
  Weights weights;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const column = first + i * 8;
    if constexpr (Config::kAlongK) {
      constexpr int kBlocksABox = kBoxColumns / kMmaK;
      uint8_t const* const box = stage + k_block / kBlocksABox * Config::kBoxBytes;
      int const piece = (k_block % kBlocksABox * 4 + t) ^ column % 8;
      weights.of_column[i] =
          *reinterpret_cast<float4 const*>(box + column * kRowBytes + piece * 16);
    } else {
      uint8_t const* const box = stage + column / kBoxColumns * Config::kBoxBytes;
      auto const at = [&](int k) {
        int const piece = column % kBoxColumns / 4 ^ k % 8;
        return *reinterpret_cast<float const*>(box + k * kRowBytes + piece * 16 + column % 4 * 4);
      };
      int const k = k_block * kMmaK + t * 2;
      weights.of_column[i] = {at(k), at(k + 1), at(k + 8), at(k + 9)};
    }
  }
  return weights;
}

// The parts of a thread's weights, in the order of WGMMA's registers.
template <int kParts>
struct WeightParts {
  uint32_t part[kParts][4];

  __device__ __forceinline__ explicit WeightParts(Weights const& weights) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 const x = weights.of_column[i];
      uint32_t low[kParts], high[kParts];
      split_bfloat16(x.x, x.y, low);
      split_bfloat16(x.z, x.w, high);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        part[p][i] = low[p];
        part[p][i + 2] = high[p];
      }
    }
  }
};

}  // namespace jgg::sm90
