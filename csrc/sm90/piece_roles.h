// The roles of kernels of 16-bit products that cut tiles along K. They are not in roles.h, because
// every translation unit that includes `fixup/pieces.h` has a table of announcements in device
// memory.
#pragma once

#include "sm90/fixup/pieces.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

// The roles of kernels that cut some of their tiles along K.
template <class Problem, class Mainloop>
struct PieceRoles : LoadingRoles<Problem, Mainloop> {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SharedStorage<Config>;
  static constexpr Registers kRegisters = kLargerLoadRegisters;

  template <class... More>
  __device__ static void schedule(Params const& params, Shared& shared, int rank,
                                  More const&... more) {
    static_assert(SchedulesPieces<Problem, More...>);
    auto const schedule_of = [&](int cluster, int clusters) {
      return Problem::piece_schedule(params, more..., cluster, clusters);
    };
    schedule_pieces<Config>(schedule_of, shared, rank);
  }

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    sm90::consume<Problem, Mainloop, PiecesFixup<Config>, typename Problem::Epilogue>(
        params, shared, consumer);
  }
};

}  // namespace jgg::sm90
