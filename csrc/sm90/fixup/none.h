// The fixup of whole tiles. It does nothing, because their accumulators are the result.
#pragma once

#include "scheduler/work_tile.h"

namespace jgg::sm90 {

struct NoFixup {
  static constexpr bool kIsCut = false;

  template <class Params>
  __device__ NoFixup(Params const&, int) {}

  template <class Accumulators>
  __device__ bool hands_over(WorkTile const&, Accumulators const&) const {
    return false;
  }

  template <class Accumulators>
  __device__ void add(WorkTile const&, Accumulators&) const {}
};

}  // namespace jgg::sm90
