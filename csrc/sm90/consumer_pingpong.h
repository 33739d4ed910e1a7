// Consumers that take turns. Each consumer multiplies all of every other tile, and stores this tile
// while the other consumer multiplies.
//
// Stages are filled in the order of the tiles, as if one consumer read them all. A consumer skips
// stages of the other consumer's tiles, and may look at its own stages only when it is its turn: a
// barrier knows only the parity of its phase, so no thread may wait for a stage two rounds ahead.
#pragma once

#include "sm90/concepts.h"
#include "sm90/epilogue/pingpong.h"
#include "sm90/mainloop/pingpong.h"
#include "sm90/order_barrier.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// Passes over the other consumer's tile and its stages. Returns false if there is no such tile.
template <class Shared, class Stage>
__device__ bool pass_over(Shared& shared, WorkIterator& slot, Stage& stage) {
  int const k_tiles = read_work(shared, slot).k_tiles;
  if (k_tiles == kNoMoreWork) return false;
  stage += k_tiles;
  return true;
}

template <class Problem, class Mainloop, class Shared>
__device__ void consume_in_turn(typename Problem::Params const& params, Shared& shared,
                                int consumer) {
  static_assert(StoresTiles<Problem>);
  using Config = typename Problem::Config;
  PingpongEpilogue<Config> const epilogue(shared, params.out, consumer,
                                          Problem::store_hint(params));
  OrderBarrier const order(kMultiplyOrder, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;

  if (consumer == 1 && !pass_over(shared, slot, stage)) return;
  do {
    WorkTile work = read_work(shared, slot);
    work.extent = uniform(work.extent);
    if (work.k_tiles == kNoMoreWork) {
      order.wait();
      epilogue.end();
      return;
    }
    StoreCoordinates const at = Problem::store_at(params, work, 0);
    int const rows = Problem::rows_left(params, work);
    if (work.k_tiles > 0) {
      // Declare accumulators inside the loop: WGMMA lists them as inputs even when it overwrites
      // them, so a variable outside would stay live across tiles.
      typename Mainloop::Accumulators accumulators;
      cute::clear(accumulators);
      cute::warpgroup_fence_operand(accumulators);
      order.wait();
      Mainloop::multiply(work, shared, stage, accumulators, [&] { order.pass(); });
      epilogue.store(accumulators, at, rows);
    } else {
      order.wait();
      order.pass();
      epilogue.store_zeros(at, rows);
    }
  } while (pass_over(shared, slot, stage));
}

}  // namespace jgg::sm90
