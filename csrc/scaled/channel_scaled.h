// The noncontracting product of operands whose scales do not change along K. lhs has one scale for
// each row or one for all, and rhs has one scale for each column or one for each matrix. The
// epilogue multiplies by these scales.
#pragma once

#include "scaled/noncontracting.h"

namespace jgg::sm90 {

template <class Config_>
struct ChannelScaledNoncontracting : ScaledNoncontracting<Config_> {
  using Base = ScaledNoncontracting<Config_>;
  using Config = Config_;
  static constexpr bool kHasWideScales = false;

  struct Params : Base::Params {
    int channels;  // scales of a matrix: n, or 1
  };

  template <class Sums>
  __device__ static void finish(Params const&, WorkTile const&, Sums&) {}

  template <class Epilogue>
  __device__ static void fetch_channel_scales(Params const& params, WorkTile const& work,
                                              Epilogue const& epilogue) {
    bool const has_products = work.k_tiles > 0;
    // Unowned rows have no matrix. With group 0, addresses stay valid.
    int const group = has_products ? work.group : 0;
    float const* const channels = params.channel_scales + work.batch * params.channel_batch_stride +
                                  int64_t(group) * params.channels;
    epilogue.fetch_scales(channels, params.channels == 1 ? 0 : work.n, params.channels,
                          has_products);
    RowScales const& rows = params.lhs_scales;
    int const first = work.begin + work.m + epilogue.first_row();
    epilogue.fetch_row_scales(has_products, [&](int i) {
      int const row = min(first + i, params.groups.rows - 1);
      return rows.data + work.batch * rows.batch_stride + int64_t(row) * rows.row_stride;
    });
  }

  static cudaError_t make_params(ScaledArguments const& a, Params& params) {
    params.channels = a.rhs_scales.data ? 1 : a.n;
    cudaError_t const status = Base::make_params(a, params);
    if (a.rhs_scales.data) {
      params.channel_scales = a.rhs_scales.data;
      params.channel_batch_stride = a.rhs_scales.batch_stride;
    }
    return status;
  }
};

}  // namespace jgg::sm90
