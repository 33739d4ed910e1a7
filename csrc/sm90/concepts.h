// The contract between the engine and what is built on it: what a problem, roles, a fixup and an
// epilogue must have. Every shell and loop of the engine asks for these concepts.
#pragma once

#include <cuda_runtime.h>

#include <concepts>
#include <cstdint>

#include "scheduler/partial_sums.h"
#include "scheduler/warp.h"
#include "scheduler/work_tile.h"
#include "sm90/config.h"
#include "sm90/tma/load.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

// ---- problems: where the tiles and operands of an operation lie in memory ----
//
// Config has the tile, the majors and the stages (KernelConfig, ScaledConfig). Params are the
// parameters of the kernel.

template <class P>
concept AnyProblem = requires(typename P::Params const& params, WorkTile const& work) {
  typename P::Config;
  // The number of rows of the result from the tile's first row on.
  { P::rows_left(params, work) } -> std::convertible_to<int>;
};

// Arguments from which launch() makes the kernel's parameters.
template <class P, class Arguments>
concept MadeFrom = requires(Arguments const& arguments, typename P::Params& params) {
  { P::make_params(arguments, params) } -> std::same_as<cudaError_t>;
  { P::max_units(arguments) } -> std::convertible_to<int64_t>;
  { arguments.max_sms } -> std::convertible_to<int>;
};

// schedule() returns a schedule of whole tiles, which has tile(unit, rank, work)
// (scheduler/ragged_schedule.h). Turns decide which cluster takes which unit (scheduler/turns.h).
template <class P>
concept SchedulesTiles = requires(typename P::Params const& params) {
  P::template schedule<DeviceWarp>(params);
  typename P::template Turns<DeviceWarp>;
};

// piece_schedule() returns the schedule of one of the clusters, which has next(rank, work)
// (scheduler/stream_k_schedule.h). `More` are further inputs of the schedule. Partial sums of
// pieces go through the workspace.
template <class P, class... More>
concept SchedulesPieces =
    requires(typename P::Params const& params, int cluster, More const&... more) {
      P::piece_schedule(params, more..., cluster, cluster);
      { params.workspace } -> std::convertible_to<PartialSumsWorkspace>;
    };

// Whether rows of lhs lie anywhere in memory (gather.h). Such a problem satisfies GathersLhs.
template <class P>
constexpr bool kGathersLhs = requires { requires P::kGathersLhs; };
// Whether each CTA loads all of its rows itself, by three warps, so that clusters share rhs.
template <class P>
constexpr bool kGathersOwnRows = requires { requires P::kGathersOwnRows; };
template <class P>
concept GathersLhs =
    kGathersLhs<P> && requires(typename P::Params const& params, WorkTile const& work, int row) {
      { P::gathered(params) } -> std::convertible_to<CUtensorMap const&>;
      { P::gathered_index(params, work, row) } -> std::convertible_to<int>;
      { P::gathered_row(params, row) } -> std::convertible_to<int>;
    };

// load_lhs() and load_rhs() load one box of an operand in a step: from element k of the contracted
// dimension and from a row or column of the tile on. `shared` says whether the cluster shares the
// operand (tma/load.h).
template <class P>
concept LoadsBoxes =
    requires(typename P::Params const& params, WorkTile const& work, int number,
             BoxLoader<P::Config::kCluster> const& loader, uint8_t* to, bool shared) {
      P::load_rhs(params, work, number, number, loader, to, number, shared);
      requires kGathersLhs<P> || requires {
        P::load_lhs(params, work, number, number, loader, to, number, shared);
      };
    };

// store_at() returns where a tile is stored, and store_hint() the L2 policy of the store. adds_to()
// says whether a tile is added to the old values of the float32 result.
template <class P>
concept StoresTiles = requires(typename P::Params const& params, WorkTile const& work, int row) {
  { P::store_at(params, work, row) } -> std::same_as<StoreCoordinates>;
  { P::store_hint(params) } -> std::same_as<StoreHint>;
  params.out;
};
template <class P>
concept AddsTiles = StoresTiles<P> && requires(WorkTile const& work) {
  { P::adds_to(work) } -> std::convertible_to<bool>;
};

// Clusters may begin their tiles together: lockstep.h.
template <class P>
concept KeepsStep = requires(typename P::Params const& params, WorkTile const& work) {
  { params.keeps_step } -> std::convertible_to<bool>;
  { P::is_whole(params, work) } -> std::convertible_to<bool>;
};

// Whether Params has rhs_box_columns, the columns of a box of rhs.
template <class P>
constexpr bool kHasSmallBoxes = requires { requires P::kHasSmallBoxes; };

// A problem of 16-bit operands, or of float32 ones in 16-bit parts:
//
//   Epilogue            the class that stores its tiles
//   kEarlyReleaseSteps  steps of a tile that release their stages early: kNoSteps, kAllSteps, ...
//   kKeepsStep, kAdds   whether it satisfies KeepsStep and AddsTiles
//   kSpreadsStores      whether the previous tile is stored only in the steps that stores_in()
//                       chooses, and not in each step
//   columns_needed(params, work)  the number of columns of rhs to load, from the tile's first one
//                       on; further columns keep what shared memory held before
//   kHasSmallBoxes      optional, see above
template <class P>
concept Problem = AnyProblem<P> && LoadsBoxes<P> &&
                  requires(typename P::Params const& params, WorkTile const& work) {
                    typename P::Epilogue;
                    { P::kEarlyReleaseSteps } -> std::convertible_to<int>;
                    { P::kKeepsStep } -> std::convertible_to<bool>;
                    { P::kAdds } -> std::convertible_to<bool>;
                    { P::kSpreadsStores } -> std::convertible_to<bool>;
                    { P::columns_needed(params, work) } -> std::convertible_to<int>;
                    requires !P::kKeepsStep || KeepsStep<P>;
                    requires !P::kAdds || AddsTiles<P>;
                    requires !kHasSmallBoxes<P> || requires {
                      { params.rhs_box_columns } -> std::convertible_to<int>;
                    };
                  };

// A problem of a list of matrices. Shared is the storage of a block. kHasNarrowTiles says whether a
// tile that needs only half of its columns is multiplied with only this half.
template <class P>
concept ListProblem = Problem<P> && requires(typename P::Shared& shared) {
  { P::kHasNarrowTiles } -> std::convertible_to<bool>;
  P::Epilogue::initialize(shared);
};

// A problem of FP8 operands. A step covers a block of scales. finish() completes the accumulators
// of a tile or of a piece: it multiplies by the scales that are the same all along K, if the
// epilogue does not.
template <class P, class Accumulators>
concept ScaledProblem =
    AnyProblem<P> && StoresTiles<P> &&
    requires(typename P::Params const& params, WorkTile const& work, int block,
             BoxLoader<P::Config::kCluster> const& loader, uint8_t* to, bool shared,
             Accumulators& accumulators) {
      P::load_rhs(params, work, block, loader, to, shared);
      requires kGathersLhs<P> || requires { P::load_lhs(params, work, block, loader, to, shared); };
      P::finish(params, work, accumulators);
      { params.out_type } -> std::convertible_to<ElementType>;
    };

// An FP8 problem whose scales change from step to step. load_scales() copies the scales of a step.
// With kHasWideScales, params.wide_scales says whether scales are instead loaded four steps at a
// time by an object that wide_scales() returns (scales/wide.h). first_step() is the step in which a
// tile or piece begins.
template <class P>
concept LoadsScales =
    requires(typename P::Params const& params, WorkTile const& work, int block, float* to) {
      { P::kHasWideScales } -> std::convertible_to<bool>;
      P::load_scales(params, work, block, to, to);
      requires !P::kHasWideScales || requires {
        { params.wide_scales } -> std::convertible_to<bool>;
        { P::first_step(work) } -> std::convertible_to<int>;
        P::wide_scales(params, work, block);
      };
    };

// An FP8 problem whose rows of lhs lie anywhere in memory, with their scales (scales/gather.h).
// token_of() is the number of a row of the tile, scales_of() the address of the scales of that
// number, and own_rhs_scales() the address of the scales of rhs that the calling thread loads.
template <class P>
concept GathersScaledRows =
    kGathersLhs<P> && requires(typename P::Params const& params, WorkTile const& work, int row) {
      { P::gathered(params) } -> std::convertible_to<CUtensorMap const&>;
      { P::token_of(params, work, row) } -> std::convertible_to<int>;
      { P::scales_of(params, row) } -> std::convertible_to<float const*>;
      { P::own_rhs_scales(params, work) } -> std::convertible_to<float const*>;
    };

// A problem of groups of few rows (swapped.h), in FP8 or in float32. channel_scale() is the scale
// of a column of the tile. lhs_at() and out_at() are the addresses of the tile's first row.
template <class P>
concept SwappedScaledProblem = AnyProblem<P> && LoadsScales<P> && StoresTiles<P> &&
                               requires(typename P::Params const& params, WorkTile const& work,
                                        int number, BoxLoader<1> const& loader, uint8_t* to) {
                                 P::load_rhs(params, work, number, loader, to, false);
                                 P::load_lhs(params, work, number, number, loader, to);
                                 {
                                   P::channel_scale(params, work, number)
                                 } -> std::convertible_to<float>;
                                 { params.out_type } -> std::convertible_to<ElementType>;
                               };
// Whether warps bring the rows of a swapped FP8 problem together with their scales. Such a problem
// has neither load_lhs() nor load_scales(), so it does not satisfy SwappedScaledProblem.
template <class P>
constexpr bool kBringsRows = requires { requires P::kBringsRows; };
template <class P>
concept SwappedSplitProblem =
    AnyProblem<P> && requires(typename P::Params const& params, WorkTile const& work, int k_tile,
                              Barrier& full, uint8_t* to) {
      P::load_rhs(params, work, k_tile, full, to);
      { P::lhs_at(params, work) } -> std::convertible_to<float const*>;
      { P::out_at(params, work) } -> std::convertible_to<float*>;
    };

// ---- roles: what the warps of a kernel do, kernel.h has the table ----
//
//   Config, Params, Shared      of the kernel
//   kThreads, kBlocks           threads of a block, and blocks that share a multiprocessor
//   initialize(params, shared)  initialises barriers; all threads call it
//   kRegisters                  of threads that load, multiply and assist; 0 means as launched, or
//                               that no threads assist
//   load, schedule, consume     the work of warp 0, of warp 1, and of each consumer
//   bring, assist               optional: the work of two warps, and of a warpgroup
// Roles that have other warps, or that choose between roles by what is in memory, have instead
//   run(params, shared, rank)   the work of a block
template <class R>
concept Roles = requires(typename R::Params const& params, typename R::Shared& shared, int index) {
  typename R::Config;
  { R::kThreads } -> std::convertible_to<int>;
  { R::kBlocks } -> std::convertible_to<int>;
  requires requires { R::run(params, shared, index); } || requires {
    R::initialize(params, shared);
    { R::kRegisters } -> std::convertible_to<Registers>;
    R::load(params, shared, index);
    R::schedule(params, shared, index);
    R::consume(params, shared, index);
    requires R::kRegisters.assist == 0 || requires { R::assist(params, shared); };
  };
};

// ---- fixups: what happens to accumulators before they are stored, in fixup/ ----

template <class F, class Accumulators>
concept Fixup = requires(F const& fixup, WorkTile const& work, Accumulators& accumulators) {
  { F::kIsCut } -> std::convertible_to<bool>;
  { fixup.hands_over(work, accumulators) } -> std::convertible_to<bool>;
  fixup.add(work, accumulators);
};

// ---- epilogues ----

// Stores a tile subtile by subtile while the next tile is multiplied. After that, store_rest()
// stores the subtiles that are left.
template <class E>
concept StoresBehind = requires(E& epilogue) {
  epilogue.store_next();
  epilogue.store_rest();
  epilogue.wait();
};

// An epilogue that only stores: epilogue/cooperative.h.
template <class E, class Accumulators>
concept Epilogue =
    StoresBehind<E> && requires(E& epilogue, StoreCoordinates at, Accumulators& accumulators) {
      epilogue.take(accumulators, at);
    };

// An epilogue of lists. prefetch() fetches what take() will need. store_early() stores what cannot
// wait until the next tile is multiplied.
template <class E, class Accumulators>
concept EpilogueOfLists =
    StoresBehind<E> && requires(E& epilogue, WorkTile const& work, Accumulators& accumulators) {
      epilogue.prefetch(work);
      epilogue.take(accumulators, work);
      epilogue.store_early();
    };

// An epilogue that computes more than a scale (consumer_fused.h). take_zeros() is for unowned rows.
template <class E, class Accumulators>
concept FusedEpilogue = StoresBehind<E> && requires(E& epilogue, WorkTile const& work,
                                                    Accumulators& accumulators, int step) {
  epilogue.take(accumulators, work);
  epilogue.take_zeros(work);
  { E::stores_in(step, step) } -> std::convertible_to<bool>;
};

// An epilogue that computes more than a scale, for consumers that take turns. begin() is called
// before a tile is multiplied.
template <class E, class Accumulators>
concept FusedEpilogueInTurn =
    requires(E& epilogue, WorkTile const& work, Accumulators& accumulators) {
      epilogue.begin(work);
      epilogue.store(accumulators);
      epilogue.store_zeros();
      epilogue.wait();
    };

}  // namespace jgg::sm90
