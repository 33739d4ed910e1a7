// How matrices get to shared memory.
#pragma once

#include "few_rows/config.h"
#include "few_rows/params.h"
#include "sm90/tma/load.h"
#include "sm90/work.h"

namespace jgg::few_rows {

// By one thread. `load(loader, descriptor, to, box, column, k)` knows the order of coordinates.
template <class Config, class Load>
__device__ __forceinline__ void load_boxes(Params const& params, SharedStorage<Config>& shared,
                                           WorkTile const& work,
                                           sm90::StageIterator<Config::kStages>& stage,
                                           Load const& load) {
  for (int step = 0; step < work.k_tiles; ++step, ++stage) {
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    Barrier& full = shared.full[stage.stage];
    full.arrive_and_expect_tx(Config::kMatrixBytes);
    sm90::BoxLoader<1> const loader(full.address(), 0, params.hint);
    uint8_t* const to = shared.matrices[stage.stage];
    int const k = step * Config::kTileK;
    load(loader, params.gate, to, 0, work.n, k);
    load(loader, Config::kHasUp ? params.up : params.gate, to + Config::kBoxBytes, 1,
         Config::kHasUp ? work.n + params.up_column : work.n + Config::kBoxColumns, k);
  }
}

}  // namespace jgg::few_rows
