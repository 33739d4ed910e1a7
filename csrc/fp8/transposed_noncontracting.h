// The ragged product of FP8 operands, for groups of few rows.
#pragma once

#include "fp8/scaled_noncontracting.h"
#include "sm90/transposed/config.h"

namespace jgg::fp8 {

template <class Lhs_, class Rhs_, class Shape>
struct TransposedConfig : Shape {
  using Lhs = Lhs_;
  using Rhs = Rhs_;
  static constexpr int kTileK = kRowBytes;
  static_assert(kTileK == kScaleBlock);

  static constexpr bool kColumnScales = false;
  static constexpr int kScaleColumns = kScaleBlock;
  static constexpr int kRhsScales = Shape::kTileN / kScaleColumns;
  static_assert(Shape::kTileN % kScaleColumns == 0);
  static constexpr int kScaleBytes = (Shape::kTileM + kRhsScales) * sizeof(float);
  static constexpr int kStages = Shape::template kStagesOf<kScaleBytes + 3 * sizeof(Barrier)>;
  static_assert(kStages >= 2, "the tile is too large for shared memory");
};

template <class Config_>
struct TransposedNoncontracting : ScaledNoncontracting<Config_> {
  using Config = Config_;
  using Base = ScaledNoncontracting<Config>;

  struct Params : Base::Params {
    void* out_data;
  };

  // What is left of the last box past the group's end reads as zeros.
  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int block, int row,
                                  Loader const& loader, uint8_t* to) {
    int const end = work.batch * params.lhs_batched * params.groups.rows + work.begin + work.extent;
    loader.load(params.lhs, to, 0, false, block * Config::kTileK,
                sm90::kRaggedRows - work.extent + work.m + row, sm90::kRaggedRows, end);
  }

  // The scale of one of a tile's columns that is the same all along K.
  __device__ static float channel_scale(Params const& params, WorkTile const& work, int column) {
    if (!params.channel_scales || work.k_tiles == 0) return 1.0f;
    return __ldg(params.channel_scales + work.batch * params.channel_batch_stride +
                 int64_t(work.group) * params.n + work.n + column);
  }

  static cudaError_t make_params(ScaledArguments const& a, Params& params) {
    cudaError_t const status = Base::make_params(a, params);
    if (status != cudaSuccess) return status;
    params.out_data = a.out;
    return sm90::encode_ragged_load(&params.lhs, view_bytes(a.lhs), a.k, Config::kBoxRows);
  }
};

}  // namespace jgg::fp8
