// The whole schedule of a ragged product as a list, computed on the host for tests and inspection.
#pragma once

#include <array>
#include <vector>

#include "scheduler/ragged_schedule.h"

namespace jgg {

// unit, rank, then the members of WorkTile in their order.
using ListedTile = std::array<int, 11>;

inline ListedTile listed_tile(int unit, int rank, WorkTile const& work) {
  return {unit,
          rank,
          work.batch,
          work.group,
          work.begin,
          work.extent,
          work.head,
          work.m,
          work.n,
          work.k_tiles,
          static_cast<int>(work.share)};
}

template <class Schedule>
std::vector<ListedTile> list_tiles(Schedule schedule, int cluster) {
  std::vector<ListedTile> tiles;
  for (int unit = 0;; ++unit) {
    for (int rank = 0; rank < cluster; ++rank) {
      WorkTile work;
      if (!schedule.tile(unit, rank, work)) return tiles;
      tiles.push_back(listed_tile(unit, rank, work));
    }
  }
}

}  // namespace jgg
