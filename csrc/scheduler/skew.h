// Decides whether the groups of a contracting product are so unequal that tiles have to be cut.
#pragma once

#include "scheduler/ceil_div.h"
#include "scheduler/chains.h"
#include "scheduler/contracting_pieces.h"
#include "scheduler/host_device.h"
#include "scheduler/segment_cursor.h"

namespace jgg {

// Where tiles are cut if groups are too unequal, and how long the work takes.
struct SkewedWork {
  ChainCuts cuts;
  int steps;  // the estimated time of all work, in steps
  int empty;  // local groups without rows, of all batches
};

// Estimates the time of whole tiles and of pieces, from the sizes alone, so that all thread blocks
// reach the same answer. Either answer gives correct results, whatever the sizes are.
//
// Whole tiles take at least as long as the largest groups, dealt to all clusters, and at least as
// long as all tiles divided by the number of clusters. Whole tiles include tiles of zeros, which
// pieces leave to idle warps.
template <class Warp, int kTileK>
class Skew {
 public:
  // Cutting must save 1 / kWorthwhilePart of the time and kWorthwhileSteps K tiles, because pieces
  // share less in L2.
  static constexpr int kWorthwhilePart = 16;
  static constexpr int kWorthwhileSteps = 16;
  // The most units of a group, and the most groups of all batches, which one warp looks at.
  static constexpr int kMostUnits = 1 << 16;
  static constexpr int kMostGroups = 1 << 10;
  // Tiles are never worth cutting if even a group with all rows has fewer steps than this.
  static constexpr int kLeastSteps = 64;

  // `zeros_cost` is what a unit of an empty group takes, in steps.
  JGG_HOST_DEVICE Skew(GroupSizes const& groups, int units, int zeros_cost)
      : groups_(groups), units_(units), zeros_cost_(zeros_cost) {}

  // Returns whether there are group sizes for which tiles are cut.
  JGG_HOST_DEVICE bool is_possible() const {
    return groups_.rows / kTileK >= kLeastSteps && units_ < kMostUnits &&
           static_cast<long long>(groups_.batches) * groups_.local_groups <= kMostGroups;
  }

  // Returns whether tiles should be cut, if there is room for `most_sums` sums that are handed
  // over. If so, `work` receives the cuts.
  JGG_HOST_DEVICE bool is_worth_cutting(int clusters, int most_sums, SkewedWork& work) const {
    Summary const all = summary();
    if (all.cost >= ChainCuts::kLongest) return false;
    work.cuts = ChainCuts(units_, all.cost, all.largest, clusters);
    if (work.cuts.sums() > most_sums) return false;
    float const share = float(units_) / float(clusters);
    float const zeros = share * float(zeros_cost_ * all.empty);
    float const pieces = max(float(work.cuts.busy(clusters)), zeros);
    work.steps = int(pieces);
    work.empty = all.empty;
    float const enough = pieces * (1 + 1.0f / kWorthwhilePart) + kWorthwhileSteps;
    if (share * float(all.cost) + zeros > enough) return true;
    // Whole tiles waste no more time than the longest tile takes.
    if (share * float(all.cost) + zeros + float(all.largest) <= enough) return false;
    return largest_groups(all.largest, clusters) > enough;
  }

 private:
  struct Summary {
    int cost;     // of one unit of every group that has rows
    int largest;  // of one unit of the largest group
    int empty;    // groups without rows
  };

  JGG_HOST_DEVICE static float max(float a, float b) { return a > b ? a : b; }

  // Calls function(cost) for each local group that `lane` looks at, with the cost of each unit of
  // the group, 0 if the group has no rows.
  template <class Function>
  JGG_HOST_DEVICE void for_each(int lane, Function function) const {
    for_each_local_size(groups_, lane, [&](int size) {
      function(size == 0 ? 0 : ceil_div(size, kTileK) + kTileChange);
    });
  }

  JGG_HOST_DEVICE Summary summary() const {
    Summary all{0, 0, 0};
    Warp::each([&](int lane) {
      for_each(lane, [&](int cost) {
        // The sum stops growing at the limit, so that it does not overflow.
        if (all.cost < ChainCuts::kLongest) all.cost += cost;
        if (cost > all.largest) all.largest = cost;
        all.empty += cost == 0;
      });
    });
    return {Warp::total(all.cost), Warp::most(all.largest), Warp::total(all.empty)};
  }

  // Returns a lower bound of the time of whole tiles. For each of several levels, all clusters have
  // to compute the tiles of all groups that cost at least this level. The bound is the longest of
  // these times.
  JGG_HOST_DEVICE float largest_groups(int largest, int clusters) const {
    constexpr int kLevels = 8;
    int counts[kLevels] = {};
    Warp::each([&](int lane) {
      for_each(lane, [&](int cost) {
        for (int level = 0; level < kLevels; ++level) {
          counts[level] += cost >= level_of(largest, level, kLevels);
        }
      });
    });
    float longest = 0;
    for (int level = 0; level < kLevels; ++level) {
      int const rounds = ceil_div(Warp::total(counts[level]) * units_, clusters);
      longest = max(longest, float(rounds) * float(level_of(largest, level, kLevels)));
    }
    return longest;
  }

  JGG_HOST_DEVICE static int level_of(int largest, int level, int levels) {
    return largest - largest / levels * level;
  }

  GroupSizes const& groups_;
  int units_;
  int zeros_cost_;
};

}  // namespace jgg
