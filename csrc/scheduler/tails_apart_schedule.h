// Assigns the whole tiles and the tails of the noncontracting product to clusters separately.
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
// is no multiple of kCluster, a row of tiles ends with a tile past the last column.
template <class Warp, int kTileM, int kTileN, int kTileK, int kCluster = 1>
class TailsApartSchedule {
 public:
  JGG_HOST_DEVICE TailsApartSchedule(GroupSizes const& groups, int n, int k, int cluster,
                                     int clusters)
      : units_{ceil_div(n, kTileN * kCluster), groups.local_groups, groups.zeroes_unowned},
        cursor_(groups, units_),
        k_tiles_(ceil_div(k, kTileK)),
        next_whole_(cluster),
        next_tail_(clusters - 1 - cluster),
        clusters_(clusters) {}

  // Sets `work` to the next tile of CTA `rank` of the cluster. Returns false after the last tile.
  JGG_HOST_DEVICE bool next(int rank, WorkTile& work) {
    Segment segment;
    bool is_tail;
    if (!cursor_.seek(next_whole_, next_tail_, segment, is_tail)) return false;
    bool const owned = is_local(segment.local_group, units_.local_groups);
    int const whole = units_.whole(segment.local_group, segment.extent), along_n = units_.along_n;
    TileCoordinate at;
    if (is_tail) {
      int const unit = next_tail_ - segment.first_unit;
      at = {whole + unit / along_n, unit % along_n * kCluster + rank,
            kCluster > 1 ? Share::kLhs : Share::kNothing};
      next_tail_ += clusters_;
    } else {
      Raster<kCluster, (kCluster > 1)> const raster(whole, along_n * kCluster);
      at = raster.at(next_whole_ - segment.first_unit, rank);
      next_whole_ += clusters_;
    }
    work = {segment.batch, segment.local_group, segment.begin,        segment.extent, 0,
            at.m * kTileM, at.n * kTileN,       owned ? k_tiles_ : 0, at.share};
    return true;
  }

 private:
  // Counts units of whole tiles, and units of tails as the cursor's second kind.
  struct Units {
    int along_n;
    int local_groups;
    bool zeroes_unowned;

    // Returns how many tiles along M of a group are whole.
    JGG_HOST_DEVICE int whole(int group, int rows) const {
      constexpr int kMostTailRows = kTileM / 4 * 3;
      return is_local(group, local_groups) ? (rows + kTileM - 1 - kMostTailRows) / kTileM : 0;
    }
    JGG_HOST_DEVICE int operator()(int group, int begin, int end) const {
      return whole(group, end - begin) * along_n;
    }
    JGG_HOST_DEVICE int second(int group, int begin, int end) const {
      if (!zeroes_unowned && !is_local(group, local_groups)) return 0;
      return (ceil_div(end - begin, kTileM) - whole(group, end - begin)) * along_n;
    }
  };

  Units units_;
  SegmentCursor<Warp, Units> cursor_;
  int k_tiles_;
  int next_whole_;  // the numbers of this cluster's next units
  int next_tail_;
  int clusters_;
};

}  // namespace jgg
