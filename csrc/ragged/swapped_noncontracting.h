// The problem out[m, n] = lhs[m, k] . rhs[group of row m] in float32, for groups of few rows: where
// its tiles and operands lie in memory.
#pragma once

#include "ragged/group_rows.h"
#include "ragged/ragged_dot.h"
#include "sm90/mainloop/swapped_split_config.h"
#include "sm90/tma/load.h"
#include "sm90/tma/views.h"

namespace jgg::sm90 {

template <class Config_>
struct SwappedNoncontracting : GroupRows<Config_> {
  using Config = Config_;

  struct Params {
    CUtensorMap rhs;
    float const* lhs;
    float* out;
    GroupSizes groups;
    int n;
    int k;
    bool lhs_batched;
    bool rhs_batched;
  };

  // Loads all boxes of rhs for a step.
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k_tile,
                                  Barrier& full, uint8_t* to) {
    // No weight is read again, so L2 need not keep it.
    BoxLoader<Config::kCluster> const loader(
        full.address(), 0, Config::kAlongK ? LoadHint::kNormal : LoadHint::kEvictFirst);
    int const group =
        (params.rhs_batched ? work.batch : 0) * params.groups.local_groups + work.group;
    int const k = k_tile * Config::kTileK;
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box, to += Config::kBoxBytes) {
      int const at = box * kBoxColumns;
      if constexpr (Config::kAlongK) {
        loader.load(params.rhs, to, box, false, k + at, work.n, group);
      } else {
        loader.load(params.rhs, to, box, false, work.n + at, k, group);
      }
    }
  }

  // Returns the address of the tile's first row in lhs.
  __device__ static float const* lhs_at(Params const& params, WorkTile const& work) {
    return params.lhs + row_of(params, work, params.lhs_batched) * params.k;
  }
  __device__ static float* out_at(Params const& params, WorkTile const& work) {
    return params.out + row_of(params, work, true) * params.n + work.n;
  }

  static cudaError_t make_params(RaggedDotArguments const& a, Params& params) {
    params.lhs = static_cast<float const*>(a.lhs);
    params.out = static_cast<float*>(a.out);
    params.groups = a.groups;
    params.n = a.n;
    params.k = a.k;
    params.lhs_batched = a.lhs_batched;
    params.rhs_batched = a.rhs_batched;
    TensorView rhs = view<float>(a.rhs);
    rhs.fetch = kFetchBox;
    int64_t const matrices = int64_t(a.rhs_batched ? a.groups.batches : 1) * a.groups.local_groups;
    return encode_plain(&params.rhs, rhs, matrices, Config::kAlongK ? a.n : a.k,
                        Config::kAlongK ? a.k : a.n, Config::kBoxRows);
  }

 private:
  __device__ static int64_t row_of(Params const& params, WorkTile const& work, bool batched) {
    return int64_t(batched ? work.batch : 0) * params.groups.rows + work.begin + work.m;
  }
};

}  // namespace jgg::sm90
