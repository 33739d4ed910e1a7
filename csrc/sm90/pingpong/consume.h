// Consumers that take turns: each multiplies whole tiles, every other one, and stores its tile
// while the other one multiplies.
//
// Stages are filled in the order of the tiles, as if one consumer read them all. A consumer passes
// over those of the other's tiles and may look at its own only when it is its turn: a barrier knows
// its phases by their parity alone, so nobody may wait for a stage two rounds ahead.
#pragma once

#include "sm90/pingpong/epilogue.h"
#include "sm90/pingpong/mainloop.h"
#include "sm90/pingpong/turn.h"
#include "sm90/previous_result.h"
#include "sm90/work_ring.h"

namespace jgg::sm90::pingpong {

// Passes over the other consumer's tile and its stages; false if there is none.
template <class Problem, class Shared, class Stage>
__device__ bool pass_over(typename Problem::Params const& params, Shared& shared,
                          WorkIterator& slot, Stage& stage) {
  WorkTile const work = read_work(shared, slot);
  if (work.k_tiles == kNoMoreWork) return false;
  stage += work.k_tiles;
  if (Problem::adds_to(params, work)) stage += PreviousResult<typename Problem::Config>::kStages;
  return true;
}

template <class Stage>
__device__ Stage next(Stage stage) {
  ++stage;
  return stage;
}

template <class Problem, class Mainloop, class Shared>
__device__ void consume(typename Problem::Params const& params, Shared& shared, int consumer) {
  using Config = typename Problem::Config;
  using Previous = PreviousResult<Config>;
  Epilogue<Config> const epilogue(shared, params.out, consumer, Problem::store_hint(params));
  Turn const turn(Turn::kMultiply, consumer);
  StageIterator<Config::kStages> stage;
  WorkIterator slot;

  if (consumer == 1 && !pass_over<Problem>(params, shared, slot, stage)) return;
  do {
    WorkTile work = read_work(shared, slot);
    work.extent = uniform(work.extent);
    if (work.k_tiles == kNoMoreWork) {
      turn.wait();
      epilogue.end();
      return;
    }
    StoreCoordinates const at = Problem::store_at(params, work, 0);
    int const rows = Problem::rows_left(params, work);
    if (work.k_tiles > 0) {
      // One variable for each tile: although the first product overwrites them, it names them as
      // an operand, which would keep those of the last tile alive up to here.
      typename Mainloop::Accumulators accumulators;
      cute::clear(accumulators);
      cute::warpgroup_fence_operand(accumulators);
      turn.wait();
      bool const adds = Problem::adds_to(params, work);
      Mainloop::multiply(work, shared, stage, accumulators, [&] {
        // The other consumer's stages come after these: by their parity alone, it could take an
        // older phase of a barrier that nobody has waited for yet for its own.
        if (adds) Previous::wait(shared, next(stage));
        turn.pass();
      });
      if (adds) Previous::template add<Mainloop>(shared, stage, consumer, accumulators);
      epilogue.store(accumulators, at, rows);
    } else {
      turn.wait();
      turn.pass();
      if (Problem::adds(params)) {
        epilogue.store_nothing();
      } else {
        epilogue.store_zeros(at, rows);
      }
    }
  } while (pass_over<Problem>(params, shared, slot, stage));
}

}  // namespace jgg::sm90::pingpong
