// Copies operands to shared memory: matrices by TMA, and rows by threads, because the rows of a TMA
// box cannot come from arbitrary tokens.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "few_rows/config.h"
#include "few_rows/params.h"
#include "sm90/tma/load.h"
#include "sm90/work.h"

namespace jgg::few_rows {

// Loads the matrices of a tile. One thread calls this.
template <class Config>
__device__ void load_matrices(Params const& params, SharedStorage<Config>& shared,
                              WorkTile const& work, sm90::StageIterator<Config::kStages>& stage) {
  int const column = first_column<Config>(params, work);
  for (int step = 0; step < work.k_tiles; ++step, ++stage) {
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    Barrier& full = shared.full[stage.stage];
    full.arrive_and_expect_tx(Config::kMatrixBytes);
    sm90::BoxLoader<1> const loader(full.address(), 0, params.hint);
    uint8_t* const to = shared.matrices[stage.stage];
    int const k = step * Config::kTileK;
    loader.load(params.matrices, to, 0, false, column, k, work.group);
    loader.load(params.second_matrices, to + Config::kBoxBytes, 1, false,
                column + params.second_column, k, work.group);
  }
}

// Loads the rows of a tile. Each thread that brings rows calls this. A row's 128 bytes of a stage
// are eight vectors of 16 bytes, swizzled so that a read of the same vector of eight rows uses all
// banks. Places of rows that the tile does not have keep old data, which only reaches rows of the
// result that are not stored.
template <class Config>
__device__ void load_rows(Params const& params, SharedStorage<Config>& shared, WorkTile const& work,
                          sm90::StageIterator<Config::kStages>& stage) {
  constexpr int kPieces = kRowBytes / 16, kElements = 16 / sizeof(typename Config::Element);
  constexpr int kRowsAtOnce = kRowThreads / kPieces;
  constexpr int kOwn = Config::kTileM / kRowsAtOnce;
  if (work.k_tiles == 0) return;
  int const thread = threadIdx.x % kRowThreads, piece = thread % kPieces;
  int const first = thread / kPieces, rows = min(work.extent - work.m, Config::kTileM);

  char const* from[kOwn];  // null for a row of zeros
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const row = first + i * kRowsAtOnce;
    from[i] = nullptr;
    if (row >= rows) continue;
    unsigned const token =
        params.template token<Config::kSortsPairs>(work.begin + work.m + row, shared.groups.order);
    if (token >= static_cast<unsigned>(params.tokens)) continue;
    from[i] = params.x + (int64_t(token) * params.k + piece * kElements) *
                             int64_t(sizeof(typename Config::Element));
  }
  // A thread's rows are eight apart, so all of them have the same swizzle.
  int const place = first * kRowBytes + (piece ^ first % kPieces) * 16;
  for (int step = 0; step < work.k_tiles; ++step, ++stage) {
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    uint8_t* const to = shared.rows[stage.stage] + place;
    bool const exists = step * Config::kTileK + piece * kElements < params.k;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (first + i * kRowsAtOnce >= rows) break;
      bool const reads = exists && from[i];
      char const* const source = reads ? from[i] + int64_t(step) * kRowBytes : params.x;
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(source),
          *reinterpret_cast<cute::uint128_t*>(to + i * kRowsAtOnce * kRowBytes), reads);
    }
    shared.full[stage.stage].arrive_after_copies();
  }
}

}  // namespace jgg::few_rows
