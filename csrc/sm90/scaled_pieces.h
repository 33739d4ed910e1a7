// The schedule and the fixup of FP8 kernels whose last wave is cut along K.
#pragma once

#include "sm90/fixup/partial_sums.h"
#include "sm90/scaled_roles.h"

namespace jgg::sm90 {

template <class Problem>
struct ScaledPieces : TileRoles<Problem> {
  static constexpr Registers kRegisters = kLargerLoadRegisters;

  template <class Shared>
  __device__ static void schedule(typename Problem::Params const& params, Shared& shared,
                                  int rank) {
    static_assert(SchedulesPieces<Problem>);
    auto const schedule_of = [&](int cluster, int clusters) {
      return Problem::piece_schedule(params, cluster, clusters);
    };
    schedule_pieces<typename Problem::Config>(schedule_of, shared, rank);
  }

  template <class Sums>
  __device__ static bool complete(typename Problem::Params const& params, WorkTile const& work,
                                  int consumer, Sums& sums) {
    // Finish every piece before the pieces are added up, instead of finishing their sum once. If
    // the sum were finished, ptxas would assign registers such that the mainloop's additions read
    // some register banks three times.
    Problem::finish(params, work, sums);
    constexpr int kSums = sizeof(sums[0]) / sizeof(float);
    PartialSums<typename Problem::Config> const partial_sums(params.workspace, consumer);
    auto const sum = [&](int i) -> float& { return sums[i / kSums][i % kSums]; };
    int const partials = work.partials;
    if (partials == kHandsOver) {
      partial_sums.hand_over(work.slot, sum);
#pragma unroll
      for (int i = 0; i < sizeof(sums) / sizeof(float); ++i) sum(i) = 0.0f;
      return false;
    }
    // Add the pieces always in the order of K, so that the result is the same every time.
    for (int i = 0; i < partials; ++i) partial_sums.add(work.slot + i, sum);
    return true;
  }
};

}  // namespace jgg::sm90
