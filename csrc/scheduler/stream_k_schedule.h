// The tiles of the noncontracting product if the last wave is cut along K.
#pragma once

#include "scheduler/assignment.h"
#include "scheduler/ragged_schedule.h"

namespace jgg {

// The pieces of one cluster, in the order in which it computes them. The number of units depends on
// the group sizes, so every cluster counts the units first. Tiles of unowned rows are not cut,
// because they take almost no time. They come last, and go first to the clusters that are idle in
// the last wave.
template <class Warp, int kTileM, int kTileN, int kTileK, int kCluster,
          class Assignment = jgg::Assignment>
class StreamKSchedule {
 public:
  JGG_HOST_DEVICE StreamKSchedule(GroupSizes const& groups, int n, int k, int cluster, int clusters)
      : tiles_(groups, n, k, Owner::kLocal),
        assignment_(tiles_.count(), tiles_.steps(), cluster, clusters),
        clusters_(clusters),
        slot_(clusters - 1 - cluster),
        unowned_((cluster + clusters - assignment_.busy()) % clusters),
        is_past_owned_(false) {}

  // Sets `work` to the next tile of CTA `rank` of the cluster. Returns false after the last tile.
  JGG_HOST_DEVICE bool next(int rank, WorkTile& work) {
    Piece piece;
    if (assignment_.next(piece)) {
      tiles_.tile(piece.unit, rank, work);
      work.first_step = piece.first_step;
      work.k_tiles = piece.steps;
      work.partials = piece.partials;
      work.slot = piece.partials == kHandsOver ? slot_ : slot_ + 1;
      return true;
    }
    if (!is_past_owned_) {
      is_past_owned_ = true;
      tiles_.restart(Owner::kNone);
    }
    int const unit = unowned_;
    unowned_ += clusters_;
    return tiles_.tile(unit, rank, work);
  }

 private:
  NoncontractingSchedule<Warp, kTileM, kTileN, kTileK, kCluster> tiles_;
  Assignment assignment_;
  int clusters_;
  int slot_;     // of this cluster's sums, followed by those of the clusters before it
  int unowned_;  // the next unit of rows that no local group owns
  bool is_past_owned_;
};

}  // namespace jgg
