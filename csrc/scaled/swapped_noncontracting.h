// The ragged product of FP8 operands, for groups of few rows.
#pragma once

#include "scaled/noncontracting.h"
#include "sm90/mainloop/swapped_scaled_config.h"

namespace jgg::sm90 {

template <class Config_>
struct SwappedScaledNoncontracting : ScaledNoncontracting<Config_> {
  using Config = Config_;
  using Params = typename ScaledNoncontracting<Config>::Params;

  // The part of the last box past the group's end reads as zeros.
  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int block, int row,
                                  Loader const& loader, uint8_t* to) {
    int const end = work.batch * params.lhs_batched * params.groups.rows + work.begin + work.extent;
    loader.load(params.lhs, to, 0, false, block * Config::kTileK,
                kRaggedRows - work.extent + work.m + row, kRaggedRows, end);
  }

  // Returns the scale of a tile's column that does not change along K, or 1 if there is none.
  __device__ static float channel_scale(Params const& params, WorkTile const& work, int column) {
    int const n = work.n + column;
    if (!params.channel_scales || work.k_tiles == 0 || n >= params.n) return 1.0f;
    return __ldg(params.channel_scales + work.batch * params.channel_batch_stride +
                 int64_t(work.group) * params.n + n);
  }
};

}  // namespace jgg::sm90
