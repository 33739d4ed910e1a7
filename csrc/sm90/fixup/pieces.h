// The fixup of pieces of a tile. The block that computes the first piece adds up the accumulators
// of all pieces. The other blocks hand their accumulators over to this block.
#pragma once

#include "scheduler/assignment.h"
#include "sm90/fixup/partial_sums.h"

namespace jgg::sm90 {

template <class Config>
class PiecesFixup {
 public:
  static constexpr bool kIsCut = true;

  template <class Params>
  __device__ PiecesFixup(Params const& params, int consumer)
      : partial_sums_(params.workspace, consumer) {}

  // Returns whether another block completes the tile. If so, the accumulators are handed over to
  // it.
  template <class Accumulators>
  __device__ bool hands_over(WorkTile const& work, Accumulators const& accumulators) const {
    if (work.partials != kHandsOver) return false;
    partial_sums_.hand_over(work.slot, accumulators);
    return true;
  }

  // Adds the sums of the tile's other pieces, always in the order of K, so that the result is the
  // same every time.
  template <class Accumulators>
  __device__ void add(WorkTile const& work, Accumulators&& accumulators) const {
    for (int i = 0; i < work.partials; ++i) partial_sums_.add(work.slot + i, accumulators);
  }

 private:
  PartialSums<Config> const partial_sums_;
};

}  // namespace jgg::sm90
