// The tiles of the noncontracting product if whole tiles and tails are assigned separately.
#pragma once

#include "scheduler/ragged_schedule.h"

namespace jgg {

// The tiles of one cluster, in the order in which it computes them. A group's last tile along M is
// a tail if it has at most three quarters of the rows of a tile. A tail takes less time than a
// whole tile, so if clusters took all tiles in turn, some clusters would get more whole tiles than
// others. Here clusters take whole tiles in turn, and tails in turn in reverse order. Clusters that
// get one whole tile less than others are therefore the first to get one tail more.
//
// A cluster computes its whole tiles of a group and then its tails of this group, so that all
// clusters read the same matrices at about the same time. Tiles of unowned rows count as tails. The
// CTAs of a cluster take neighbours along N and share the lhs tile. If the number of tiles along N
// is odd, one CTA has a tile past the last column.
template <class Warp, int kTileM, int kTileN, int kTileK, int kCluster = 1>
class TailsApartSchedule {
 public:
  JGG_HOST_DEVICE TailsApartSchedule(GroupSizes const& groups, int n, int k, int cluster,
                                     int clusters)
      : cursor_(groups,
                {ceil_div(n, kTileN * kCluster), groups.local_groups, groups.zeroes_unowned}),
        n_units_(ceil_div(n, kTileN * kCluster)),
        k_tiles_(ceil_div(k, kTileK)),
        local_groups_(groups.local_groups),
        next_whole_(cluster),
        next_tail_(clusters - 1 - cluster),
        clusters_(clusters) {}

  // Sets `work` to the next tile of CTA `rank` of the cluster. Returns false after the last tile.
  JGG_HOST_DEVICE bool next(int rank, WorkTile& work) {
    Segment segment;
    bool is_tail;
    if (!cursor_.seek(next_whole_, next_tail_, segment, is_tail)) return false;
    bool const owned = is_local(segment.local_group, local_groups_);
    int const whole = owned ? whole_tiles(segment.extent) : 0;
    TileCoordinate at;
    if (is_tail) {
      int const unit = next_tail_ - segment.first_unit;
      at = {whole + unit / n_units_, unit % n_units_ * kCluster + rank,
            kCluster > 1 ? Share::kLhs : Share::kNothing};
      next_tail_ += clusters_;
    } else {
      at = Grid(whole, n_units_ * kCluster).at(next_whole_ - segment.first_unit, rank);
      next_whole_ += clusters_;
    }
    work = {segment.batch, segment.local_group, segment.begin,        segment.extent, 0,
            at.m * kTileM, at.n * kTileN,       owned ? k_tiles_ : 0, at.share};
    return true;
  }

 private:
  using Grid = Raster<kCluster, (kCluster > 1)>;
  static constexpr int kMostTailRows = kTileM / 4 * 3;

  // Returns how many tiles of a group are whole.
  JGG_HOST_DEVICE static int whole_tiles(int rows) {
    return (rows + kTileM - 1 - kMostTailRows) / kTileM;
  }

  // Whole tiles, and tails as the second kind.
  struct Units {
    int n_units;
    int local_groups;
    bool zeroes_unowned;

    JGG_HOST_DEVICE int operator()(int group, int begin, int end) const {
      return is_local(group, local_groups) ? whole_tiles(end - begin) * n_units : 0;
    }
    JGG_HOST_DEVICE int second(int group, int begin, int end) const {
      bool const owned = is_local(group, local_groups);
      if (!owned && !zeroes_unowned) return 0;
      int const whole = owned ? whole_tiles(end - begin) : 0;
      return (ceil_div(end - begin, kTileM) - whole) * n_units;
    }
  };

  SegmentCursor<Warp, Units> cursor_;
  int n_units_;
  int k_tiles_;
  int local_groups_;
  int next_whole_;  // the numbers of this cluster's next units
  int next_tail_;
  int clusters_;
};

}  // namespace jgg
