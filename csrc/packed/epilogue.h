// Turns sums into results like few_rows/epilogue.h, after multiplying them by the scales of
// columns and by the factor of the format.
#pragma once

#include "few_rows/epilogue.h"
#include "packed/loads.h"

namespace jgg::packed {

// few_rows::Terms of a lane, and the scales of its columns in two strips.
template <int kBlocks>
struct Terms : few_rows::Terms<kBlocks> {
  float scale[2][2];
};

template <class Config>
class Epilogue : protected few_rows::Epilogue<Config> {
  using Base = few_rows::Epilogue<Config>;

 public:
  static constexpr bool kHasScales = !is_int4(Config::kFormat);
  static constexpr float kFactor = factor_of(Config::kFormat);

  // The warp's first column is column `first` of the tile.
  __device__ Epilogue(Params const& params, WorkTile const& work, int first, int const* order)
      : Base(params, work, first, order), params_(params), group_(work.group) {}

  template <int kBlocks>
  __device__ Terms<kBlocks> read() const {
    Terms<kBlocks> terms{Base::template read<kBlocks>(), {}};
    if constexpr (kHasScales) read_scales(terms.scale);
    return terms;
  }

  template <int kBlocks>
  __device__ void store(few_rows::Sums<kBlocks>& sums, Terms<kBlocks> const& terms) const {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks * 4; ++i) {
      int const strip = i / (kBlocks * 4), block = i / 4 % kBlocks, e = i % 4;
      sums[strip][block][e] *= kHasScales ? terms.scale[strip][e / 2] : kFactor;
    }
    Base::store(sums, terms);
  }

 protected:
  __device__ Params const& params() const { return params_; }

  // Returns the number that the sums of a column are multiplied by.
  __device__ float scale_of(bool is_up, int column) const {
    if (!kHasScales || column >= params_.n) return kFactor;
    Matrices const& matrices = is_up ? params_.up : params_.gate;
    int64_t const before = int64_t(group_) * params_.strips() * kSide;
    return kFactor * __ldg(matrices.channel_scales + before + column);
  }

  // Reads the factors of a lane's columns.
  __device__ void read_scales(float (&scales)[2][2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales[i / 2][i % 2] = scale_of(this->has_up() && i / 2, Base::column(i / 2, i % 2));
    }
  }

 private:
  Params const& params_;
  int group_;
};

}  // namespace jgg::packed
