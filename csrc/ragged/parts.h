// A product of float32 operands as one product of their float16 parts. The kernel walks the
// contracted dimension once for each pair of parts, with the same tiles, descriptors and stages as
// for float16.
#pragma once

#include <cutlass/numeric_types.h>

#include "parts/terms.h"
#include "ragged/parts_workspace.h"

namespace jgg::sm90 {

// `Base` is the problem of float16 operands. For `Base`, the low parts are batches that follow the
// last batch of the high parts, so `Base` needs no further coordinates for low parts.
template <class Base>
struct RaggedParts : Base {
  using Config = typename Base::Config;
  // The thread that loads has no registers left for lockstep.
  static constexpr bool kKeepsStep = false;

  struct Params : Base::Params {
    int terms;
    int lhs_batches;  // of each part; 1 if all batches share the parts
    int rhs_batches;
    unsigned const* lhs_maxima;
    unsigned const* rhs_maxima;
  };

  template <class Warp>
  class Schedule : public Base::template Schedule<Warp> {
    using Tiles = typename Base::template Schedule<Warp>;

   public:
    __device__ explicit Schedule(Params const& params)
        : Tiles(Base::template schedule<Warp>(params)), terms_(params.terms) {}

    __device__ bool tile(int unit, int rank, WorkTile& work) {
      bool const found = Tiles::tile(unit, rank, work);
      if (Warp::leads()) work.k_tiles *= terms_;
      return found;
    }

   private:
    int const& terms_;  // a reference: the scheduler's warp has no register for a copy
  };

  template <class Warp>
  __device__ static Schedule<Warp> schedule(Params const& params) {
    return Schedule<Warp>(params);
  }

  // Returns the number of steps of a tile's segment. A segment is the product of one pair of parts.
  __device__ static int steps(Params const& params, WorkTile const& work) {
    return params.terms == 1 ? work.k_tiles : work.k_tiles / parts::kMostTerms;
  }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Position const at(params, work, k);
    bool const low = params.terms > 1 && at.segment == 0;
    Base::load_lhs(params, part(work, params.lhs_batches, low), at.k, row, loader, to, box, shared);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Position const at(params, work, k);
    bool const low = params.terms > 1 && at.segment == 1;
    Base::load_rhs(params, part(work, params.rhs_batches, low), at.k, column, loader, to, box,
                   shared);
  }

  __device__ static unsigned lhs_maximum(Params const& params, WorkTile const& work) {
    return maximum(params, params.lhs_maxima, params.lhs_batches, work);
  }

  __device__ static unsigned rhs_maximum(Params const& params, WorkTile const& work) {
    return maximum(params, params.rhs_maxima, params.rhs_batches, work);
  }

  static cudaError_t make_params(RaggedDotArguments const& a, Params& params) {
    RaggedWorkspace const workspace(a);
    RaggedDotArguments parts = a;
    parts.lhs = workspace.lhs().parts;
    parts.rhs = workspace.rhs().parts;
    // Makes the descriptors of both operands end after the low parts of all batches.
    parts.lhs_batched = parts.rhs_batched = true;
    parts.groups.batches = 2 * a.groups.batches;
    cudaError_t const status = Base::make_params(parts, params);
    params.groups.batches = a.groups.batches;
    params.terms = parts::terms_of(a.accuracy);
    params.lhs_batches = workspace.lhs().batched ? a.groups.batches : 1;
    params.rhs_batches = workspace.rhs().batched ? a.groups.batches : 1;
    params.lhs_maxima = workspace.lhs().maxima;
    params.rhs_maxima = workspace.rhs().maxima;
    return status;
  }

 private:
  struct Position {
    int segment;
    int k;

    __device__ Position(Params const& params, WorkTile const& work, int k_of_all) {
      int const length = steps(params, work) * Config::kTileK;
      segment = (k_of_all >= length) + (k_of_all >= 2 * length);
      k = k_of_all - segment * length;
    }
  };

  __device__ static WorkTile part(WorkTile work, int batches, bool low) {
    work.batch = (batches == 1 ? 0 : work.batch) + (low ? batches : 0);
    return work;
  }

  __device__ static unsigned maximum(Params const& params, unsigned const* maxima, int batches,
                                     WorkTile const& work) {
    int const batch = batches == 1 ? 0 : work.batch;
    return maxima[int64_t(batch) * params.groups.local_groups + work.group];
  }
};

}  // namespace jgg::sm90
