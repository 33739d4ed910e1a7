// The tiles that a block is working on, in shared memory. Finding a tile takes hundreds of
// instructions. So only the loader, which runs ahead of products and stores, finds tiles and leaves
// them here.
#pragma once

#include "fp64/kernel_config.h"

namespace jgg::fp64 {

template <class Config, class Problem>
class TileSlots {
 public:
  using Tile = typename Problem::Tile;

  __device__ explicit TileSlots(uint8_t* shared)
      : slots_(reinterpret_cast<Tile*>(shared + Config::kTilesAt)) {
    static_assert(sizeof(Tile) * Config::kTileSlots <= Config::kTileSlotBytes);
  }

  // Threads read the tile only after a barrier.
  __device__ void put(int round, Tile const& tile) {
    if (threadIdx.x == 0) slots_[round % Config::kTileSlots] = tile;
  }

  __device__ Tile const& at(int round) const { return slots_[round % Config::kTileSlots]; }

 private:
  Tile* slots_;
};

}  // namespace jgg::fp64
