// A noncontracting product whose tiles may be pieces: part of the steps of a unit.
#pragma once

#include "ragged/noncontracting.h"
#include "scheduler/partial_sums.h"
#include "sm90/fixup/partial_sums.h"

namespace jgg::sm90 {

template <class Config_>
struct CutNoncontracting : RaggedNoncontracting<Config_> {
  using Base = RaggedNoncontracting<Config_>;
  using Config = Config_;
  static constexpr bool kSpreadsStores = false;
  // No steps release their stages early, because tiles that are cut are long, and consumers have no
  // registers left for a second loop.
  static constexpr int kEarlyReleaseSteps = kNoSteps;

  struct Params : Base::Params {
    PartialSumsWorkspace workspace;
  };

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Base::load_lhs(params, work, first_k(work) + k, row, loader, to, box, shared);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Base::load_rhs(params, work, first_k(work) + k, column, loader, to, box, shared);
  }

  static cudaError_t make_params(RaggedDotArguments const& a, Params& params) {
    params.workspace =
        PartialSumsWorkspace(a.workspace, a.workspace_bytes, PartialSums<Config>::kFloats);
    if (max_clusters<Config>(params.workspace) == 0) return cudaErrorInvalidValue;
    return Base::make_params(a, params);
  }

 private:
  __device__ static int first_k(WorkTile const& work) { return work.first_step * Config::kTileK; }
};

}  // namespace jgg::sm90
