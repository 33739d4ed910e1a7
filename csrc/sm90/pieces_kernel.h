// The persistent kernel whose last wave is cut along K: the roles of sm90/kernel.h, with a schedule
// of pieces and consumers that exchange partial sums.
#pragma once

#include "sm90/fixup/partial_sums.h"
#include "sm90/kernel.h"
#include "sm90/schedule_pieces.h"

namespace jgg::sm90 {

template <class Problem, class Mainloop, class Shared>
__device__ void consume_pieces(typename Problem::Params const& params, Shared& shared,
                               int consumer) {
  using Config = typename Problem::Config;
  static_assert(!Problem::kHasHeads, "storing below a head takes registers that are in use here");
  typename Mainloop::Accumulators accumulators;
  CooperativeEpilogue<Config> epilogue(shared, params.out, consumer, Problem::store_hint(params));
  PartialSums<Config> const partial_sums(params.workspace, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  int const first_row = consumer * kRowsPerConsumer;
  while (true) {
    WorkTile const work = read_work(shared, slot);
    if (work.k_tiles == kNoMoreWork) break;
    bool const has_rows = uniform(Problem::rows_left(params, work)) > first_row;
    StoreCoordinates const at = Problem::store_at(params, work, first_row);
    if (has_rows && work.k_tiles > 0) {
      Mainloop::multiply(params, work, shared, stage, consumer, accumulators,
                         [&](int) { epilogue.store_next(); });
      epilogue.store_rest();
      if (work.partials == kHandsOver) {
        partial_sums.hand_over(work.slot, accumulators);
      } else {
        if constexpr (Problem::kAdds) {
          PreviousResult<Config>::template add<Mainloop>(shared, stage, consumer, accumulators);
        }
        // Always in the order of K, so that the result is the same every time.
        for (int i = 0; i < work.partials; ++i) partial_sums.add(work.slot + i, accumulators);
        epilogue.take(accumulators, at);
      }
    } else {
      Mainloop::skip(work, shared, stage);
      if constexpr (Problem::kAdds) {
        if (Problem::adds_to(work)) PreviousResult<Config>::template skip<Mainloop>(shared, stage);
      } else {
        epilogue.store_rest();
        if (has_rows) epilogue.take([](int) { return 0.0f; }, at);
      }
    }
  }
  epilogue.store_rest();
  epilogue.wait();
}

// What every warp does once the barriers are there.
template <class Problem, class Mainloop, class Shared, class ScheduleOf>
__device__ void run_piece_roles(typename Problem::Params const& params, Shared& shared, int rank,
                                ScheduleOf const& schedule_of) {
  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kPieceRegisters.load>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) produce<Problem, Mainloop>(params, shared, rank);
    if (warp == 1) schedule_pieces<typename Problem::Config>(schedule_of, shared, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kPieceRegisters.multiply>();
    consume_pieces<Problem, Mainloop>(params, shared, warpgroup - 1);
  }
}

template <class Problem, class Mainloop>
__global__ void __launch_bounds__(kThreads, 1)
    stream_k_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = aligned_storage<Config>(dynamic_shared);
  int const rank = rank_in_cluster<Config>();

  initialize_barriers<Mainloop>(shared);
  sync_cluster<Config>();
  run_piece_roles<Problem, Mainloop>(params, shared, rank, [&](int cluster, int clusters) {
    return Problem::schedule(params, cluster, clusters);
  });
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
