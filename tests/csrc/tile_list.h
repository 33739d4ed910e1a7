// The whole schedule of a ragged product as a list, computed on the host for tests and inspection.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "scheduler/turns.h"
#include "scheduler/work_tile.h"

namespace jgg {

// An entry has the unit, the rank, the cluster that takes the unit, and then the members of
// WorkTile in their order.
using ListedTile = std::array<int, 12>;

inline ListedTile listed_tile(int unit, int rank, int cluster, WorkTile const& work) {
  return {unit,        rank,      cluster, work.batch, work.group,   work.begin,
          work.extent, work.head, work.m,  work.n,     work.k_tiles, static_cast<int>(work.share)};
}

// Lists tiles in the order of units. Each of `clusters` clusters of `ranks` CTAs finds its own
// tiles.
template <class Turns, class Schedule>
std::vector<ListedTile> list_tiles(Schedule const& schedule, int ranks, int clusters) {
  std::vector<ListedTile> tiles;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    Schedule own = schedule;
    with_turns<Turns>(own, cluster, clusters, [&](auto turns) {
      WorkTile work;
      for (int unit = turns.next(own); own.tile(unit, 0, work); unit = turns.next(own)) {
        for (int rank = 0; rank < ranks; ++rank) {
          own.tile(unit, rank, work);
          tiles.push_back(listed_tile(unit, rank, cluster, work));
        }
      }
    });
  }
  std::sort(tiles.begin(), tiles.end());
  return tiles;
}

}  // namespace jgg
