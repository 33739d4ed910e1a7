// The persistent kernel whose consumers take turns: the roles of sm90/kernel.h, but each consumer
// multiplies whole tiles, every other one, and stores its tile while the other one multiplies.
//
// Stages are filled in the order of the tiles, as if one consumer read them all. A consumer passes
// over those of the other's tiles and may look at its own only when it is its turn: a barrier knows
// its phases by their parity alone, so nobody may wait for a stage two rounds ahead.
#pragma once

#include "sm90/direct_epilogue.h"
#include "sm90/kernel.h"

namespace jgg::sm90 {

// Whose turn it is to multiply. Each turn that is passed on is waited for once, the one after the
// last tile too, so no arrival is left over.
class Turn {
 public:
  // The first turn is consumer 0's.
  __device__ explicit Turn(int consumer) : consumer_(consumer) {
    if (consumer_ == 1) pass();
  }

  __device__ void wait() const { cutlass::arch::NamedBarrier::sync(kThreadsOfTwo, id(consumer_)); }
  __device__ void pass() const {
    cutlass::arch::NamedBarrier::arrive(kThreadsOfTwo, id(1 - consumer_));
  }

 private:
  static constexpr int kThreadsOfTwo = kConsumers * kWarpgroup;
  // Those of sync_warpgroup come before.
  __device__ static int id(int consumer) { return 1 + kConsumers + consumer; }

  int consumer_;
};

// The same value, as far as the compiler can tell, in all threads of the warp.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Passes over the other consumer's tile and its stages; false if there is none.
template <class Shared, class Stage>
__device__ bool pass_over(Shared& shared, WorkIterator& slot, Stage& stage) {
  int const k_tiles = uniform(read_work(shared, slot).k_tiles);
  if (k_tiles == kNoMoreWork) return false;
  stage += k_tiles;
  return true;
}

template <class Problem, class Mainloop, class Shared>
__device__ void consume_in_turns(typename Problem::Params const& params, Shared& shared,
                                 int consumer) {
  using Config = typename Problem::Config;
  DirectEpilogue<Config> const epilogue(shared, consumer);
  Turn const turn(consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;
  // Accumulators leave no registers for a work tile, so it is read anew when it is to be stored,
  // and its slot is not given back before.
  auto const take_target = [&] {
    auto const target = Problem::store_to(params, shared.work[slot.stage]);
    release_work(shared, slot);
    return target;
  };
  // `accumulators` are zeros, one variable for each tile: although the first product overwrites
  // them, it names them as an operand, and would keep those of the last tile alive up to here.
  auto const compute_rows = [&](WorkTile const& work, auto accumulators) {
    cute::warpgroup_fence_operand(accumulators);
    turn.wait();
    Mainloop::multiply(params, work, shared, stage, consumer, accumulators, [&](int step) {
      // All stages of the tile have arrived, and its last products are on their way.
      if (step + 1 == work.k_tiles) turn.pass();
    });
    epilogue.store(accumulators, take_target());
  };

  if (consumer == 1 && !pass_over(shared, slot, stage)) return;
  do {
    shared.work_full[slot.stage].wait(slot.phase);
    WorkTile work = shared.work[slot.stage];
    work.k_tiles = uniform(work.k_tiles);
    bool const short_tile =
        Problem::kHasShortTiles && Problem::rows_left(params, work) <= kRowsPerConsumer;
    if (work.k_tiles <= 0) {
      turn.wait();
      if (work.k_tiles == kNoMoreWork) return;
      turn.pass();
      epilogue.store_zeros(take_target());
    } else if (short_tile) {
      compute_rows(work, typename Mainloop::template FirstRows<kRowsPerConsumer>{});
    } else {
      compute_rows(work, typename Mainloop::Accumulators{});
    }
  } while (pass_over(shared, slot, stage));
}

template <class Problem, class Mainloop>
__global__ void __launch_bounds__(kThreads, 1)
    pingpong_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  extern __shared__ uint8_t dynamic_shared[];
  // A pointer that stays one to shared memory takes half the registers of a generic one.
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(
      dynamic_shared + (-cute::cast_smem_ptr_to_uint(dynamic_shared) & 1023));
  int const rank = rank_in_cluster<Config>();

  initialize_barriers<Mainloop>(shared);
  sync_cluster<Config>();

  int const warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    int const warp = threadIdx.x / kWarpSize;
    if (warp == 0) produce<Problem, Mainloop>(params, shared, rank);
    if (warp == 1) schedule_tiles<Problem>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume_in_turns<Problem, Mainloop>(params, shared, warpgroup - 1);
  }
  // A CTA's shared memory must outlive the arrivals and multicasts of its peer.
  sync_cluster<Config>();
}

}  // namespace jgg::sm90
