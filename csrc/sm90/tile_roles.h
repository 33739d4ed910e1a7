// Defaults of roles: whole tiles, in blocks of three warpgroups, one block on each multiprocessor.
#pragma once

#include "sm90/config.h"
#include "sm90/work.h"

namespace jgg::sm90 {

template <class Problem_>
struct TileRoles {
  using Problem = Problem_;
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  static constexpr Registers kRegisters = kTileRegisters;
  static constexpr int kThreads = sm90::kThreads;
  static constexpr int kBlocks = 1;

  template <class Shared>
  __device__ static void schedule(Params const& params, Shared& shared, int) {
    schedule_tiles<Problem>(params, shared);
  }
};

}  // namespace jgg::sm90
