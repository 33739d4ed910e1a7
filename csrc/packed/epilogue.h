// From sums to results.
#pragma once

#include "few_rows/epilogue.h"
#include "packed/loads.h"

namespace jgg::packed {

// Stores a warp's sums of two strips times the scales of their columns, the first of which is
// `first` of the tile.
template <class Config, int kBlocks>
__device__ __forceinline__ void store(Params const& params, WorkTile const& work, int first,
                                      few_rows::Sums<kBlocks>& sums) {
  if constexpr (Config::kFormat != Format::kInt4) {
    int64_t const before = int64_t(work.group) * params.strips() * kSide;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const strip = i / 2, high = i % 2;
      int const column = work.n + first + few_rows::lane_column() + 8 * high +
                         (Config::kHasUp ? 0 : strip * Config::kNextRun);
      Matrices const& matrices = Config::kHasUp && strip ? params.up : params.gate;
      float const scale =
          column < params.n ? __ldg(matrices.channel_scales + before + column) : 0.0f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        sums[strip][block][2 * high] *= scale;
        sums[strip][block][2 * high + 1] *= scale;
      }
    }
  }
  few_rows::Epilogue<Config>(params, work, first).template store<kBlocks>(sums);
}

}  // namespace jgg::packed
