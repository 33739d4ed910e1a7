// The noncontracting product of FP8 operands if the rows of lhs, and their scales, lie anywhere in
// memory (sm90/gather.h).
#pragma once

#include "dispatch.h"
#include "scaled/noncontracting.h"
#include "sm90/gather.h"

namespace jgg::sm90 {

template <class Config_>
struct GatheredScaledNoncontracting : ScaledNoncontracting<Config_> {
  using Base = ScaledNoncontracting<Config_>;
  using Config = Config_;
  static constexpr bool kGathersLhs = true;

  struct Params : Base::Params {
    GatheredRows rows;
  };

  __device__ static CUtensorMap const& gathered(Params const& params) { return params.lhs; }

  // Returns the number of the token that is row `i` of the tile. The number is out of range if
  // there is no such row.
  __device__ static int token_of(Params const& params, WorkTile const& work, int i) {
    int const in_group = work.m + i;
    return params.rows.row(in_group < work.extent ? params.rows.of[work.begin + in_group] : -1);
  }

  // Returns the address of the scales of token `row`, or null if there is no such token.
  __device__ static float const* scales_of(Params const& params, int row) {
    bool const exists = unsigned(row) < unsigned(params.rows.tokens);
    RowScales const& lhs = params.lhs_scales;
    return exists ? lhs.data + int64_t(row) * lhs.row_stride : nullptr;
  }

  static cudaError_t make_params(ScaledArguments const& a, Params& params) {
    cudaError_t const status = Base::make_params(a, params);
    if (status != cudaSuccess) return status;
    if (!a.rows.of || !params.wide_scales) return kNotCompiled;
    params.rows = a.rows;
    return encode_rows(&params.lhs, view_bytes(a.lhs), a.rows.tokens, a.k);
  }
};

}  // namespace jgg::sm90
