// The contract between the engine and what is built on it: what a problem has to have, what roles,
// fixups and epilogues have. Every shell and loop of the engine asks for these.
#pragma once

#include <concepts>
#include <cstdint>

#include "scheduler/work_tile.h"
#include "sm90/config.h"
#include "sm90/epilogue/cooperative.h"

namespace jgg::sm90 {

// What the arguments of an operation become: where its tiles and their operands lie.
//
//   Config                          tile, majors, stages: KernelConfig, ScaledConfig
//   Params                          parameters of the kernel, made by make_params() on the host
//   rows_left(params, work)         rows of the result from the tile's first one on
//   load_lhs(params, work, k, row, loader, to, box, shared), load_rhs(... column ...)
//                                   one box of a step, and whether the cluster shares it:
//                                   tma/load.h
// and a schedule, of whole tiles or of pieces:
//   schedule<Warp>(params)          tile(unit, rank, work): scheduler/ragged_schedule.h
//   Turns<Warp>                     who takes which unit: scheduler/turns.h
//   piece_schedule(params, ..., cluster, clusters)
//                                   next(rank, work): scheduler/stream_k_schedule.h
template <class P>
concept AnyProblem = requires(typename P::Params const& params, WorkTile const& work) {
  typename P::Config;
  { P::rows_left(params, work) } -> std::convertible_to<int>;
};

// A problem of 16-bit operands, or of float32 ones in 16-bit parts:
//
//   Epilogue            what takes its tiles
//   kEarlyReleaseSteps  steps of a tile that release their stages early: kNoSteps, kAllSteps, ...
//   kKeepsStep          clusters may begin their tiles together: lockstep.h. Params then has
//                       keeps_step, and is_whole(params, work) says of which tiles
//   kAdds               tiles are added to what the float32 result held: adds_to(work), store_at()
//   kSpreadsStores      the tile before is stored in steps that stores_in() chooses, not in each
//   columns_needed(params, work)  columns to load of rhs, from the tile's first one on; others are
//                       whatever shared memory holds
//   kHasSmallBoxes      where it is there and true, Params has rhs_box_columns: of a box of rhs
template <class P>
concept Problem =
    AnyProblem<P> && requires(typename P::Params const& params, WorkTile const& work) {
      typename P::Epilogue;
      { P::kEarlyReleaseSteps } -> std::convertible_to<int>;
      { P::kKeepsStep } -> std::convertible_to<bool>;
      { P::kAdds } -> std::convertible_to<bool>;
      { P::kSpreadsStores } -> std::convertible_to<bool>;
      { P::columns_needed(params, work) } -> std::convertible_to<int>;
    };

// What the warps of a kernel do: kernel.h has the table.
//
//   Config, Params, Shared      of the kernel
//   kThreads, kBlocks           of a block, and blocks of a multiprocessor
//   initialize(params, shared)  barriers, by all threads
//   kRegisters                  of threads that load, multiply and convert; 0: as launched, or none
//   load, schedule, consume     of one warp, one warp, and each consumer
//   bring, convert              if it has them, of two warps, and of a warpgroup
// or, of roles that have other warps, or choose among roles by what is in memory,
//   run(params, shared, rank)   all that a block does
template <class R>
concept Roles = requires(typename R::Params const& params, typename R::Shared& shared, int index) {
  typename R::Config;
  { R::kThreads } -> std::convertible_to<int>;
  { R::kBlocks } -> std::convertible_to<int>;
  requires requires { R::run(params, shared, index); } || requires {
    R::initialize(params, shared);
    { R::kRegisters } -> std::convertible_to<Registers>;
    R::load(params, shared, index);
    R::consume(params, shared, index);
  };
};

// What becomes of a tile's sums before they are stored: fixup/none.h, fixup/pieces.h.
template <class F, class Sums>
concept Fixup = requires(F const& fixup, WorkTile const& work, Sums& sums) {
  { F::kIsCut } -> std::convertible_to<bool>;
  { fixup.hands_over(work, sums) } -> std::convertible_to<bool>;
  fixup.add(work, sums);
};

// What stores them: epilogue/cooperative.h. A tile is stored while the next one
// is being multiplied, chunk by chunk.
template <class E, class Sums>
concept Epilogue = requires(E& epilogue, StoreCoordinates place, Sums& sums) {
  epilogue.take(sums, place);
  epilogue.store_next();
  epilogue.store_rest();
  epilogue.wait();
};

}  // namespace jgg::sm90
