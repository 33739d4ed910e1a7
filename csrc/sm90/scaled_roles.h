// The roles of FP8 kernels: one thread copies, two warps bring scales, two warpgroups multiply,
// scale and store.
#pragma once

#include "sm90/epilogue/scaled.h"
#include "sm90/mainloop/scaled.h"
#include "sm90/scaled_loading.h"
#include "sm90/tile_roles.h"

namespace jgg::sm90 {

template <class Problem, class Work, class Shared>
__device__ void consume_scaled(typename Problem::Params const& params, Shared& shared,
                               int consumer) {
  using Config = typename Problem::Config;
  using Mainloop = ScaledMainloop<Problem>;
  using Epilogue = ScaledEpilogue<Config>;
  static_assert(ScaledProblem<Problem, typename Epilogue::Sums>);
  typename Epilogue::Sums sums = {};
  Epilogue epilogue(shared, params.out, params.out_type, consumer, Problem::store_hint(params));
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  int const first_row = consumer * kRowsPerConsumer;
  for (bool more = true; more; ++slot) {
    // The sums leave few registers, so the tile stays in the ring and is read where it is needed.
    shared.work_full[slot.stage].wait(slot.phase);
    WorkTile const& work = shared.work[slot.stage];
    more = work.k_tiles != kNoMoreWork;
    int const rows = more ? uniform(Problem::rows_left(params, work)) : 0;
    int const k_tiles = uniform(work.k_tiles);
    bool is_result = more;
    if (rows > first_row && k_tiles > 0) {
      auto const store = [&](int slice) { epilogue.store(sums[slice], slice); };
      if constexpr (Config::kPromotes) {
        Mainloop::multiply(k_tiles, shared, stage, consumer, sums, store);
      } else {
        Mainloop::accumulate(k_tiles, shared, stage, consumer, sums, store);
      }
      is_result = Work::complete(params, work, consumer, sums);
    } else {
      Mainloop::skip(work, shared, stage);
      epilogue.flush(sums);
    }
    if (is_result && Problem::rows_left(params, work) > first_row) {
      if constexpr (Config::kChannelScales) Problem::fetch_channel_scales(params, work, epilogue);
      epilogue.finish(Problem::store_at(params, work, first_row));
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) shared.work_empty[slot.stage].arrive();
  }
  epilogue.wait();
}

// The schedule, registers and fixup of whole tiles. ScaledPieces has those of stream-K pieces.
template <class Problem>
struct WholeScaledTiles : TileRoles<Problem> {
  // Returns whether the sums are the result of a tile. If not, it sets them to zero.
  template <class Sums>
  __device__ static bool complete(typename Problem::Params const& params, WorkTile const& work, int,
                                  Sums& sums) {
    Problem::finish(params, work, sums);
    return true;
  }
};

template <class Work, class Problem = typename Work::Problem>
struct ScaledRoles
    : ScaledLoading<Work, ScaledMainloop<Problem>,
                    std::conditional_t<kGathersLhs<Problem>,
                                       GatheringStorage<ScaledStorage<typename Problem::Config>>,
                                       ScaledStorage<typename Problem::Config>>> {
  template <class Shared>
  __device__ static void consume(typename Problem::Params const& params, Shared& shared,
                                 int consumer) {
    consume_scaled<Problem, Work>(params, shared, consumer);
  }
};

}  // namespace jgg::sm90
