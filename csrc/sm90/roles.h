// The roles of kernels of 16-bit products.
#pragma once

#include "sm90/concepts.h"
#include "sm90/consumer.h"
#include "sm90/consumer_listed.h"
#include "sm90/consumer_pingpong.h"
#include "sm90/fixup/none.h"
#include "sm90/gather.h"
#include "sm90/kernel.h"
#include "sm90/mainloop/cooperative.h"
#include "sm90/producer.h"
#include "sm90/tile_roles.h"

namespace jgg::sm90 {

template <class Mainloop, class Config>
__device__ void initialize_barriers(SharedStorage<Config>& shared, int loading_warps = 1) {
  if (threadIdx.x == 0) {
    set_arrivals(shared.full, 1);
    set_arrivals(shared.empty, Mainloop::kEmptyArrivals);
    initialize_work(shared, loading_warps);
    fence_barriers();
  }
}

// The base of the roles for whole tiles and for stream-K pieces.
template <class Problem, class Mainloop>
struct LoadingRoles : TileRoles<Problem> {
  static_assert(sm90::Problem<Problem>);
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SharedStorage<Config>;
  // The warps that gather contracted rows keep the numbers of rows of several steps.
  static constexpr Registers kRegisters =
      kGathersOwnRows<Problem> && Config::kLhsMajor == Major::kMN ? kLargerLoadRegisters
                                                                  : kTileRegisters;

  __device__ static void initialize(Params const&, Shared& shared) {
    initialize_barriers<Mainloop>(shared, 1 + kGatheringWarps<Problem>);
  }

  __device__ static void load(Params const& params, Shared& shared, int rank) {
    produce<Problem, Mainloop>(params, shared, rank);
  }

  __device__ static void bring(Params const& params, Shared& shared, int rank, int warp)
    requires kGathersLhs<Problem>
  {
    if constexpr (kGathersOwnRows<Problem>) {
      if constexpr (Config::kLhsMajor == Major::kK) {
        gather_own_rows<Problem>(params, shared, warp);
      } else {
        gather_own_contracted_rows<Problem>(params, shared, warp);
      }
    } else {
      gather_rows<Problem>(params, shared, rank, warp);
    }
  }
};

// The roles of kernels of whole tiles. Consumers share a tile, or take turns.
template <class Problem, class Mainloop>
struct WholeTileRoles : LoadingRoles<Problem, Mainloop> {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SharedStorage<Config>;

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    if constexpr (Config::kTakesTurns) {
      consume_in_turn<Problem, Mainloop>(params, shared, consumer);
    } else {
      sm90::consume<Problem, Mainloop, NoFixup, typename Problem::Epilogue>(params, shared,
                                                                            consumer);
    }
  }
};

// The roles of kernels of lists of problems, whose descriptors are parameters of the kernel.
template <class Problem, class Mainloop>
struct ListRoles : TileRoles<Problem> {
  using Params = typename Problem::Params;
  using Shared = typename Problem::Shared;
  static_assert(ListProblem<Problem> && sizeof(Params) <= kParameterLimit);

  __device__ static void initialize(Params const&, Shared& shared) {
    if (threadIdx.x == 0) Problem::Epilogue::initialize(shared);
    initialize_barriers<Mainloop>(shared);
  }

  __device__ static void load(Params const& params, Shared& shared, int rank) {
    produce<Problem, Mainloop>(params, shared, rank);
  }

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    consume_listed<Problem, Mainloop>(params, shared, consumer);
  }
};

}  // namespace jgg::sm90
