// The tiles of a list of products of unequal shapes, for one persistent launch. There are two ways
// to find a tile. Either every cluster searches the list for its next tile, as with CUTLASS's
// kDeviceOnly, or every cluster reads its tiles from a table that was made when the shapes became
// known, as with kHostPrecompute.
#pragma once

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"
#include "scheduler/raster.h"
#include "scheduler/warp.h"
#include "scheduler/work_tile.h"

namespace jgg {

// Returns the unit at place `unit` in an order in which every other round of units goes to the
// clusters in reverse. Units get cheaper towards the end of the list. In this order, a cluster that
// got one of the last, short units of a round gets one of the first, long units of the next round.
JGG_HOST_DEVICE int serpentine(int unit, int clusters) {
  int const round = unit / clusters, place = unit - round * clusters;
  return round % 2 == 0 ? unit : round * clusters + clusters - 1 - place;
}

// Results of [m, n], one after another in memory.
struct ListedProblem {
  int m;
  int n;
  int k_tiles;       // mainloop steps of a tile
  int first_matrix;  // matrices of the problems before this one
};

// A unit of work of a schedule made beforehand: the number of the problem, and of the unit in this
// problem. A negative problem pads the schedule of a cluster that has fewer units than another.
struct ScheduledUnit {
  int problem;
  int unit;
};

struct ProblemList {
  ListedProblem const* problems;
  int count;
  int matrices;  // of all problems

  JGG_HOST_DEVICE int matrices_of(int problem) const {
    int const end = problem + 1 < count ? problems[problem + 1].first_matrix : matrices;
    return end - problems[problem].first_matrix;
  }
};

// Finds the problem that owns a unit. Units are numbered problem by problem. Each lane of the warp
// holds one problem of a window, and a prefix sum of the problems' units tells where each problem
// begins. The window only moves forward.
template <class Warp, class UnitsOf>
class ProblemCursor {
 public:
  JGG_HOST_DEVICE ProblemCursor(int count, UnitsOf units_of)
      : count_(count), units_of_(units_of), window_(0), units_before_(0) {
    load_window();
  }

  // Finds the problem that owns `unit`, and the problem's first unit. Returns false past the last
  // unit. `unit` must not be less than in earlier calls.
  JGG_HOST_DEVICE bool seek(int unit, int& problem, int& first_unit) {
    int in_window = Warp::read(ends_, kWarpSize - 1);
    while (unit - units_before_ >= in_window) {
      if (window_ + kWarpSize >= count_) return false;
      window_ += kWarpSize;
      units_before_ += in_window;
      load_window();
      in_window = Warp::read(ends_, kWarpSize - 1);
    }
    int const target = unit - units_before_;
    int const lane = Warp::first(Warp::map([=](int end) { return int(target < end); }, ends_));
    problem = window_ + lane;
    first_unit = units_before_ + (lane == 0 ? 0 : Warp::read(ends_, lane - 1));
    return true;
  }

 private:
  JGG_HOST_DEVICE void load_window() {
    int const window = window_, count = count_;
    UnitsOf const units_of = units_of_;
    auto const units =
        Warp::map([=](int lane) { return window + lane < count ? units_of(window + lane) : 0; },
                  Warp::lanes());
    ends_ = Warp::scan(units, [](int a, int b) { return a + b; });
  }

  int count_;
  UnitsOf units_of_;
  int window_;               // the problem of lane 0
  int units_before_;         // of the problems before the window
  typename Warp::Int ends_;  // where each lane's units end, from the beginning of the window
};

// A whole warp walks a schedule in ascending order of units. CTA `rank` of a cluster gets its own
// tile of each unit. One lane writes the tile, which may be in shared memory. `clusters` clusters
// walk the schedule, and each takes every clusters-th unit.
template <class Warp, int kTileM, int kTileN, int kCluster>
class ListSchedule {
 public:
  // `scheduled` has `num_scheduled` units, in the order in which clusters take them. If it is null,
  // the clusters find their units themselves, in the order of serpentine().
  JGG_HOST_DEVICE ListSchedule(ProblemList const& list, ScheduledUnit const* scheduled,
                               int num_scheduled, int clusters)
      : list_(list),
        scheduled_(scheduled),
        num_scheduled_(num_scheduled),
        clusters_(clusters),
        cursor_(scheduled ? 0 : list.count, UnitsOf{list}) {}

  // Sets `work` to the tile of CTA `rank` in unit `unit`. Returns false past the last unit. A
  // unit of padding gives a tile of a result without rows.
  JGG_HOST_DEVICE bool tile(int unit, int rank, WorkTile& work) {
    int problem, first_unit = 0;
    if (scheduled_) {
      if (unit >= num_scheduled_) return false;
      problem = scheduled_[unit].problem;
      unit = scheduled_[unit].unit;
    } else {
      unit = serpentine(unit, clusters_);
      if (!cursor_.seek(unit, problem, first_unit)) return false;
    }
    if (!Warp::leads()) return true;
    work = {};
    work.share = Share::kNothing;
    if (problem >= 0) place(problem, unit - first_unit, rank, work);
    return true;
  }

  JGG_HOST_DEVICE static int units(ProblemList const& list, int problem) {
    return list.matrices_of(problem) * raster(list.problems[problem]).units();
  }

 private:
  struct UnitsOf {
    ProblemList list;
    JGG_HOST_DEVICE int operator()(int problem) const { return units(list, problem); }
  };

  JGG_HOST_DEVICE static Raster<kCluster> raster(ListedProblem const& problem) {
    return Raster<kCluster>(ceil_div(problem.m, kTileM), ceil_div(problem.n, kTileN));
  }

  JGG_HOST_DEVICE void place(int index, int unit, int rank, WorkTile& work) const {
    ListedProblem const& problem = list_.problems[index];
    Raster<kCluster> const tiles = raster(problem);
    int const per_matrix = tiles.units();
    work.group = index;
    work.batch = unit / per_matrix;
    TileCoordinate const at = tiles.at(unit - work.batch * per_matrix, rank);
    work.extent = problem.m;
    work.m = at.m * kTileM;
    work.n = at.n * kTileN;
    work.k_tiles = problem.k_tiles;
    work.share = at.share;
  }

  ProblemList list_;
  ScheduledUnit const* scheduled_;
  int num_scheduled_;
  int clusters_;
  ProblemCursor<Warp, UnitsOf> cursor_;
};

}  // namespace jgg
