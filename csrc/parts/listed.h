// Computes products of lists of float32 operands as products of their float16 parts, with the tiles
// and stages of kernels for 16-bit operands.
#pragma once

#include <cstdint>

#include "parts/terms.h"
#include "scheduler/work_tile.h"

namespace jgg::parts {

// `Base` is the problem of float16 operands, with `terms` times as many steps. For `Base`, the low
// part of a matrix is a separate matrix that follows its high part. `Base::matrix` returns the
// number of a tile's matrix among all matrices of the launch.
//
// The products with a low part come first. Their steps alternate, so that the second product finds
// in L2 the operands that the first product has read. The products of high parts follow.
template <class Base>
struct ListedParts : Base {
  using Config = typename Base::Config;

  struct Params : Base::Params {
    int terms;
    // The bits of each matrix's largest magnitude.
    unsigned const* lhs_maxima;
    unsigned const* rhs_maxima;
  };

  // Returns the number of steps that multiply one pair of parts of a tile.
  __device__ static int steps(Params const& params, WorkTile const& work) {
    return params.terms == 1 ? work.k_tiles : work.k_tiles / kMostTerms;
  }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Step const step(params, work, k);
    Base::load_lhs(params, part(params, work, step.low_lhs), step.k, row, loader, to, box, shared);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Step const step(params, work, k);
    Base::load_rhs(params, part(params, work, step.low_rhs), step.k, column, loader, to, box,
                   shared);
  }

  __device__ static unsigned lhs_maximum(Params const& params, WorkTile const& work) {
    return params.lhs_maxima[Base::matrix(params, work)];
  }

  __device__ static unsigned rhs_maximum(Params const& params, WorkTile const& work) {
    return params.rhs_maxima[Base::matrix(params, work)];
  }

 private:
  struct Step {
    bool low_lhs = false;
    bool low_rhs = false;
    int k;

    __device__ Step(Params const& params, WorkTile const& work, int k_of_all) : k(k_of_all) {
      if (params.terms == 1) return;
      int const high = 2 * steps(params, work) * Config::kTileK;
      if (k_of_all >= high) {
        k = k_of_all - high;
      } else {
        low_rhs = k_of_all % (2 * Config::kTileK) != 0;
        low_lhs = !low_rhs;
        k = k_of_all / (2 * Config::kTileK) * Config::kTileK;
      }
    }
  };

  __device__ static WorkTile part(Params const& params, WorkTile work, bool low) {
    if (params.terms > 1) work.batch = 2 * work.batch + low;
    // Makes the compiler compute the coordinates that depend on work.m and work.n again in each
    // step, because the producer has too few registers to keep all of them from step to step.
    asm volatile("" : "+r"(work.m), "+r"(work.n));
    return work;
  }
};

}  // namespace jgg::parts
