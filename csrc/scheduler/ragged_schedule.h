// The tiles of the two ragged products. A whole warp walks a schedule in ascending order of units.
// CTA `rank` of a cluster gets its own tile of each unit. One lane writes the tile, which may be in
// shared memory.
#pragma once

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"
#include "scheduler/raster.h"
#include "scheduler/segment_cursor.h"
#include "scheduler/turns.h"
#include "scheduler/work_tile.h"

namespace jgg {

// The rows of a group as tiles see them. If rows are the contiguous dimension of an operand, loads
// start at multiples of kAlign rows, so a group's first tile includes the end of the previous
// group.
template <int kAlign>
struct AlignedRows {
  int begin;
  int extent;
  int head;

  JGG_HOST_DEVICE AlignedRows(int group_begin, int group_end)
      : begin(group_begin / kAlign * kAlign),
        extent(group_end > group_begin ? group_end - begin : 0),
        head(group_begin - begin) {}
};

// The rows that a schedule covers: all rows, rows that a local group owns, or unowned rows.
enum class Owner : int { kAny, kLocal, kNone };

// Returns whether a group's matrix is on this device.
JGG_HOST_DEVICE bool is_local(int group, int local_groups) {
  return group >= 0 && group < local_groups;
}

// out[m, n] = lhs[m, k] . rhs[group of row m][k, n]: every row of the output belongs to one row of
// tiles. Unowned rows belong to tiles without steps.
template <class Warp, int kTileM, int kTileN, int kTileK, int kCluster, int kAlign = 1,
          bool kSharesLhs = false>
class NoncontractingSchedule {
 public:
  JGG_HOST_DEVICE NoncontractingSchedule(GroupSizes const& groups, int n, int k,
                                         Owner owner = Owner::kAny)
      : local_groups_(groups.local_groups),
        n_tiles_(ceil_div(n, kTileN)),
        k_tiles_(ceil_div(k, kTileK)),
        zeroes_unowned_(groups.zeroes_unowned),
        cursor_(groups, units_of(owner)) {}

  // Goes back to the first unit of the rows that `owner` selects.
  JGG_HOST_DEVICE void restart(Owner owner) { cursor_.restart(units_of(owner)); }

  // Returns the number of units. Call it before the first call of tile().
  JGG_HOST_DEVICE int count() { return cursor_.count(); }

  // Returns the steps of a unit that a local group owns.
  JGG_HOST_DEVICE int steps() const { return k_tiles_; }

  JGG_HOST_DEVICE bool tile(int unit, int rank, WorkTile& work) {
    Segment segment;
    if (!cursor_.seek(unit, segment)) return false;
    if (!Warp::leads()) return true;
    bool const owned = is_local(segment.local_group, local_groups_);
    Rows const rows(segment.begin, segment.begin + segment.extent);
    auto const at = raster(rows, n_tiles_).at(unit - segment.first_unit, rank);
    work = {segment.batch, segment.local_group, rows.begin,           rows.extent, rows.head,
            at.m * kTileM, at.n * kTileN,       owned ? k_tiles_ : 0, at.share};
    return true;
  }

 private:
  using Rows = AlignedRows<kAlign>;

  JGG_HOST_DEVICE static auto raster(Rows const& rows, int n_tiles) {
    return Raster<kCluster, kSharesLhs>(ceil_div(rows.extent, kTileM), n_tiles);
  }

  struct Units {
    int n_tiles;
    int local_groups;
    Owner owner;
    bool zeroes_unowned;
    JGG_HOST_DEVICE bool local_only() const { return owner == Owner::kLocal; }
    JGG_HOST_DEVICE int operator()(int group, int begin, int end) const {
      bool const is_owned = is_local(group, local_groups);
      if (is_owned ? owner == Owner::kNone : owner == Owner::kLocal || !zeroes_unowned) return 0;
      return raster(Rows(begin, end), n_tiles).units();
    }
  };

  JGG_HOST_DEVICE Units units_of(Owner owner) const {
    return {n_tiles_, local_groups_, owner, zeroes_unowned_};
  }

  int local_groups_;
  int n_tiles_;
  int k_tiles_;
  bool zeroes_unowned_;
  SegmentCursor<Warp, Units> cursor_;
};

// Cost of the change from one tile to the next, in K tiles.
constexpr int kTileChange = 2;

// Returns how many times the mean groups of a contracting product have at most if they do not come
// first. With 1, some products whose rows are not gathered are faster and some are slower
// (docs/notes/wgrad.md).
constexpr int hot_times_mean(bool gathers) { return gathers ? 1 : 2; }

// The sizes that all groups of a contracting product share, computed on the host.
template <int kTileM, int kTileN, int kTileK, int kCluster>
struct ContractingGrid {
  // If groups have at most this many rows on average, most groups take a single step, so nearly all
  // groups cost the same.
  static constexpr int kEqualRows = kTileK / 2;
  // If all units of an average group have at most this many steps together, with kTileChange for
  // each unit, clusters do not look for the one that is free first. The search takes about a
  // microsecond per group, in which all clusters together compute 110 steps. If clusters take units
  // in turn instead, kernels take three quarters of the time with 66 steps per group, and 5 % more
  // time with 72 steps.
  static constexpr int kFewSteps = 66;

  Raster<kCluster> raster;
  int units;           // of each group
  int hot_rows;        // groups of more rows than this come first
  bool has_few_steps;  // an average group has at most kFewSteps steps

  ContractingGrid() = default;
  // Groups of more than `times_mean` times the mean come first. If groups have at most `few_rows`
  // rows on average, they keep their order.
  ContractingGrid(GroupSizes const& groups, int m, int n, int few_rows = kEqualRows,
                  int times_mean = 2)
      : raster(ceil_div(m, kTileM), ceil_div(n, kTileN)),
        units(raster.units()),
        hot_rows(groups.rows) {
    int const mean = groups.rows / groups.groups;
    has_few_steps = int64_t(units) * (ceil_div(mean, kTileK) + kTileChange) <= kFewSteps;
    if (mean > few_rows) hot_rows = times_mean * mean;
  }
};

// out[group][m, n] = lhs[rows of group, m]^T . rhs[rows of group, n]: every local group has the
// same tiles and its own number of mainloop steps, none if it is empty. Groups may be padded in
// memory to start at multiples of kPad rows.
//
// Large groups come first, unless the mean is small. If their long tiles began last, a few clusters
// would still be busy when all others are done.
template <class Warp, int kTileM, int kTileN, int kTileK, int kCluster, int kAlign = 1,
          int kPad = 1, class TurnsOfFewSteps_ = RoundRobin>
class ContractingSchedule {
 public:
  using TurnsOfFewSteps = TurnsOfFewSteps_;
  using Grid = ContractingGrid<kTileM, kTileN, kTileK, kCluster>;

  JGG_HOST_DEVICE ContractingSchedule(GroupSizes const& groups, Grid const& grid)
      : groups_(groups),
        grid_(grid),
        cursor_(groups, Units{groups.local_groups, grid.units}, grid.hot_rows) {}

  JGG_HOST_DEVICE bool tile(int unit, int rank, WorkTile& work) {
    Segment segment;
    if (!cursor_.seek(unit, segment)) return false;
    if (!Warp::leads()) return true;
    AlignedRows<kAlign> const rows(segment.stored_begin, segment.stored_begin + segment.extent);
    work.batch = segment.batch;
    work.group = segment.local_group;
    work.begin = rows.begin;
    work.extent = rows.extent;
    work.head = rows.head;
    work.k_tiles = ceil_div(rows.extent, kTileK);
    auto const at = grid_.raster.at(unit - segment.first_unit, rank);
    work.m = at.m * kTileM;
    work.n = at.n * kTileN;
    work.share = at.share;
    return true;
  }

  JGG_HOST_DEVICE bool has_few_steps() const { return grid_.has_few_steps; }

  // Sets `run` to the units of the group that owns `unit`. All units of a group cost the same.
  // Returns false past the last unit.
  JGG_HOST_DEVICE bool run(int unit, Run& run) {
    Segment segment;
    if (!cursor_.seek(unit, segment)) return false;
    run = {segment.first_unit + grid_.units, cost_of(segment.extent)};
    return true;
  }

  // EvenRanges calls these two functions.
  JGG_HOST_DEVICE int cost() const {
    int cost = 0;
    Warp::each([&](int lane) {
      for_each_local_size(groups_, lane, [&](int size) {
        // The sum stops growing before it overflows. Ranges are then uneven.
        if (cost < kMostCost) cost += cost_of(size);
      });
    });
    cost = Warp::total(cost < kMostCost ? cost : kMostCost);
    return (cost < kMostCost ? cost : kMostCost) * grid_.units;
  }
  JGG_HOST_DEVICE int first_unit(int cost, int& before) {
    Segment segment;
    if (!cursor_.seek_cost(cost, cost_of, segment, before)) return kPastAllUnits;
    int const of_unit = cost_of(segment.extent), doubled = 2 * (cost - before) - of_unit;
    int const units = doubled <= 0 ? 0 : ceil_div(doubled, 2 * of_unit);
    before += units * of_unit;
    return segment.first_unit + units;
  }

 private:
  // The most that one unit of each group may cost together. Times the units of a group, which are
  // few if groups have few steps, this must not overflow.
  static constexpr int kMostCost = 1 << 24;

  // Returns the cost of each unit of a group.
  JGG_HOST_DEVICE static int cost_of(int rows) { return ceil_div(rows, kTileK) + kTileChange; }

  struct Units {
    int local_groups;
    int units;
    JGG_HOST_DEVICE int operator()(int local_group, int, int) const {
      return local_group >= 0 && local_group < local_groups ? units : 0;
    }
  };

  GroupSizes const& groups_;
  Grid const& grid_;
  SegmentCursor<Warp, Units, kPad, /*kHotFirst=*/true> cursor_;
};

}  // namespace jgg
