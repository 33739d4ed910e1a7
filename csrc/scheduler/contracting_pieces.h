// The tiles of the contracting product if some tiles are cut along their rows, so that unequal
// groups keep all clusters busy.
#pragma once

#include "scheduler/assignment.h"
#include "scheduler/chains.h"
#include "scheduler/ragged_schedule.h"

namespace jgg {

// Returns the cost of a group that has rows: its K tiles and the change of output tiles.
template <int kTileK>
struct ChainSteps {
  int local_groups;

  JGG_HOST_DEVICE int operator()(int local_group, int begin, int end) const {
    if (local_group < 0 || local_group >= local_groups || begin == end) return 0;
    return ceil_div(end - begin, kTileK) + kTileChange;
  }
};

// The pieces of one cluster, in the order in which it computes them. All groups have the same
// units. Chain i consists of unit i of every group, one after another. All chains are therefore
// equally long, and `ChainAssignment` deals them out. A piece is a tile of a part of its group's
// rows. Groups without rows have no tiles here.
//
// `cuts` may be for chains that are a little longer or shorter than these chains. The last range of
// a chain then ends where the chain ends.
template <class Warp, int kTileM, int kTileN, int kTileK, int kCluster>
class ContractingPieces {
 public:
  using Grid = ContractingGrid<kTileM, kTileN, kTileK, kCluster>;

  // Keeps a reference to `cuts`.
  JGG_HOST_DEVICE ContractingPieces(GroupSizes const& groups, Grid const& grid,
                                    ChainCuts const& cuts, int cluster, int clusters)
      : groups_(groups),
        grid_(grid),
        cuts_(cuts),
        cursor_(groups, Steps{groups.local_groups}),
        ranges_(cuts, cluster, clusters),
        range_{0, 0, 0, 0},
        at_(0) {}

  // Sets `work` to the next tile of CTA `rank` of the cluster. Returns false after the last tile.
  JGG_HOST_DEVICE bool next(int rank, WorkTile& work) {
    while (true) {
      Segment segment;
      if (at_ >= range_.end || !cursor_.seek(at_, segment)) {
        if (!ranges_.next(cuts_, range_)) return false;
        at_ = range_.begin;
        cursor_.restart(Steps{groups_.local_groups});
        continue;
      }
      int const steps = ceil_div(segment.extent, kTileK), start = segment.first_unit;
      at_ = start + steps + kTileChange;
      int const first = step_in_group(range_.begin - start, steps);
      int const last = step_in_group(range_.end - start, steps);
      if (first == last) continue;

      work.batch = segment.batch;
      work.group = segment.local_group;
      work.begin = segment.begin + first * kTileK;
      work.extent = (last == steps ? segment.extent : last * kTileK) - first * kTileK;
      work.head = 0;
      work.k_tiles = last - first;
      auto const at = grid_.raster.at(range_.chain, rank);
      work.m = at.m * kTileM;
      work.n = at.n * kTileN;
      work.share = at.share;
      set_partials(start, steps, first, last, work);
      return true;
    }
  }

 private:
  using Steps = ChainSteps<kTileK>;

  // Converts a step of the chain, counted from the group's first step, to a step of the group's
  // tiles. If a piece on one side of a cut would have very few steps, the piece on the other side
  // takes them.
  JGG_HOST_DEVICE static int step_in_group(int step, int steps) {
    int const inside = step - kTileChange;
    if (inside >= steps) return steps;
    if (inside < ChainCuts::kLeastPiece) return 0;
    return inside > steps - ChainCuts::kLeastPiece ? steps : inside;
  }

  // The cluster with a group's first steps adds the sums of the other clusters, which compute the
  // next parts of the chain.
  JGG_HOST_DEVICE void set_partials(int start, int steps, int first, int last,
                                    WorkTile& work) const {
    int const cut = range_.chain - cuts_.whole();
    work.partials = 0;
    work.slot = cut * cuts_.sums_of_chain() + range_.part;
    if (first > 0) {
      work.partials = kHandsOver;
      --work.slot;
    } else if (last < steps) {
      int part = range_.part + 1;
      while (step_in_group(cuts_.begin(cut, part) - start, steps) < steps) ++part;
      work.partials = part - 1 - range_.part;
    }
  }

  GroupSizes const& groups_;
  Grid const& grid_;
  ChainCuts const& cuts_;
  SegmentCursor<Warp, Steps> cursor_;
  ChainAssignment ranges_;
  ChainRange range_;
  int at_;  // the next step of the chain
};

}  // namespace jgg
