// Noncontracting products with stream-K: a work tile may be a piece, which is some of a unit's
// steps.
#pragma once

#include <algorithm>

#include "scaled/channel_scaled.h"
#include "scaled/noncontracting.h"
#include "scheduler/partial_sums.h"
#include "sm90/fixup/partial_sums.h"

namespace jgg::sm90 {

template <class Base_>
struct CutScaled : Base_ {
  using Base = Base_;
  using Config = typename Base::Config;

  struct Params : Base::Params {
    PartialSumsWorkspace workspace;
  };

  __device__ static int first_step(WorkTile const& work) { return work.first_step; }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    Base::load_lhs(params, work, work.first_step + block, loader, to, shared);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    Base::load_rhs(params, work, work.first_step + block, loader, to, shared);
  }

  __device__ static void load_scales(Params const& params, WorkTile const& work, int block,
                                     float* to_lhs, float* to_rhs) {
    Base::load_scales(params, work, work.first_step + block, to_lhs, to_rhs);
  }

  static cudaError_t make_params(ScaledArguments const& a, Params& params) {
    params.workspace = workspace(a);
    if (max_clusters<Config>(params.workspace) == 0) return cudaErrorInvalidValue;
    return Base::make_params(a, params);
  }

  // Returns the most clusters that have work.
  static int64_t max_units(ScaledArguments const& a) {
    return std::min(Assignment::kClustersAUnit * Base::max_units(a),
                    max_clusters<Config>(workspace(a)));
  }

 private:
  static PartialSumsWorkspace workspace(ScaledArguments const& a) {
    return {a.workspace, a.workspace_bytes, PartialSums<Config>::kFloats};
  }
};

template <class Config>
using CutScaledNoncontracting = CutScaled<ScaledNoncontracting<Config>>;
template <class Config>
using CutChannelScaledNoncontracting = CutScaled<ChannelScaledNoncontracting<Config>>;

}  // namespace jgg::sm90
