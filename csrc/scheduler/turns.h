// Assigns units of work to clusters. There is no counter in memory, because it would have to be
// reset before each launch. Instead every cluster computes its own turns from the sizes, so the
// same sizes always give the same turns.
#pragma once

#include "scheduler/host_device.h"
#include "scheduler/warp.h"

namespace jgg {

// A number past the last unit of every schedule.
constexpr int kPastAllUnits = 0x7fffffff;

// Consecutive units that cost the same.
struct Run {
  int end;   // the unit after the last one
  int cost;  // of each, in any measure of time
};

// Gives units to clusters in turn, for units of equal cost.
class RoundRobin {
 public:
  JGG_HOST_DEVICE RoundRobin(int cluster, int clusters) : unit_(cluster), clusters_(clusters) {}

  // Returns the next unit of this cluster. If no unit is left, returns a unit past the end of the
  // schedule.
  template <class Schedule>
  JGG_HOST_DEVICE int next(Schedule const&) {
    int const unit = unit_;
    unit_ += clusters_;
    return unit;
  }

 private:
  int unit_;
  int clusters_;
};

// How long each cluster is busy with the units that it got so far.
template <class Warp, int kMaxClusters>
class Loads {
 public:
  using Int = typename Warp::Int;

  JGG_HOST_DEVICE explicit Loads(int clusters) {
    for (int slot = 0; slot < kSlots; ++slot) {
      loads_[slot] = Warp::map(
          [=](int lane) {
            int const cluster = slot * kWarpSize + lane;
            return cluster < clusters ? cluster : kNone;
          },
          Warp::lanes());
    }
  }

  // Gives units of this cost to the clusters that are free first, one unit each and at most `most`
  // units. Stops before a cluster would get a second unit. Returns the number of units given. Sets
  // `place` to the place of `cluster` among the clusters that got a unit, or to at least their
  // number if `cluster` got none. A call gives many units at once, because a scheduler has to keep
  // up with 66 clusters.
  JGG_HOST_DEVICE int give(int cost, int most, int cluster, int& place) {
    int const first = Warp::min(over_slots([](int a, int b) { return a < b ? a : b; }));
    int const added = packed(cost);
    // The load at which the least loaded cluster would be picked again. Loads are unique because
    // the number of the cluster is in the low bits.
    int limit = first + added;
    int given = count_below(limit);
    if (given > most) {
      limit = limit_of(most, first, limit);
      given = most;
    }
    int const own = load_of(cluster);
    place = own < limit ? count_below(own) : given;
    int const rebase = first >= kRebase ? kRebase : 0;
    map([=](int load) {
      return load == kNone ? load : (load < limit ? load + added : load) - rebase;
    });
    return given;
  }

 private:
  static constexpr int kSlots = (kMaxClusters + kWarpSize - 1) / kWarpSize;
  static constexpr int kIds = 256;  // a load is in the bits above the number of its cluster
  static_assert(kMaxClusters <= kIds);
  static constexpr int kNone = 0x7fffffff;
  // Loads never differ by more than the largest cost, so what all loads have in common is
  // subtracted before they overflow.
  static constexpr int kMaxCost = 1 << 21;
  static constexpr int kRebase = (1 << 21) * kIds;

  JGG_HOST_DEVICE static int packed(int cost) { return (cost < kMaxCost ? cost : kMaxCost) * kIds; }

  JGG_HOST_DEVICE int count_below(int limit) const {
    int clusters = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      clusters += Warp::count(Warp::map([=](int load) { return int(load < limit); }, loads_[slot]));
    }
    return clusters;
  }

  // Returns a limit that exactly `clusters` loads are below. No load is below `low`, and more than
  // `clusters` loads are below `high`.
  JGG_HOST_DEVICE int limit_of(int clusters, int low, int high) const {
    while (true) {
      int const middle = low + (high - low) / 2;
      int const below = count_below(middle);
      if (below == clusters) return middle;
      (below < clusters ? low : high) = middle;
    }
  }

  JGG_HOST_DEVICE int load_of(int cluster) const {
    Int loads = loads_[0];
    for (int slot = 1; slot < kSlots; ++slot) {
      if (cluster / kWarpSize == slot) loads = loads_[slot];
    }
    return Warp::read(loads, cluster % kWarpSize);
  }

  template <class Operation>
  JGG_HOST_DEVICE Int over_slots(Operation operation) const {
    Int result = loads_[0];
    for (int slot = 1; slot < kSlots; ++slot) result = Warp::map(operation, result, loads_[slot]);
    return result;
  }

  template <class Function>
  JGG_HOST_DEVICE void map(Function function) {
    for (int slot = 0; slot < kSlots; ++slot) loads_[slot] = Warp::map(function, loads_[slot]);
  }

  Int loads_[kSlots];  // of cluster 32 slot + lane
};

// Gives each unit to the cluster that is free first, for units of unequal cost. schedule.run(unit,
// run) gets the cost of units, and returns false past the last unit.
template <class Warp, int kMaxClusters>
class EarliestFree {
 public:
  JGG_HOST_DEVICE EarliestFree(int cluster, int clusters)
      : cluster_(cluster), unit_(0), run_{0, 0}, loads_(clusters) {}

  template <class Schedule>
  JGG_HOST_DEVICE int next(Schedule& schedule) {
    while (true) {
      if (unit_ == run_.end && !schedule.run(unit_, run_)) return unit_;
      int place;
      int const given = loads_.give(run_.cost, run_.end - unit_, cluster_, place);
      unit_ += given;
      if (place < given) return unit_ - given + place;
    }
  }

 private:
  int cluster_;
  int unit_;  // all units before this one are given
  Run run_;
  Loads<Warp, kMaxClusters> loads_;
};

// Gives each cluster a range of consecutive units. The costs of all units, laid end to end, are cut
// into ranges of equal cost, and a unit belongs to the range in which its middle lies. A cluster
// does not look at the units of other clusters one by one, as in EarliestFree, and no unit is cut,
// as in EvenAssignment. The schedule has, besides run():
//
//   cost()                    about the cost of all units together; the same for all clusters
//   first_unit(cost, before)  the first unit whose middle is not before this cost of units;
//                             `before` becomes the cost of all units before it. Called once, first
class EvenRanges {
 public:
  JGG_HOST_DEVICE EvenRanges(int cluster, int clusters)
      : cluster_(cluster), clusters_(clusters), unit_(-1), before_(0), end_(0), run_{0, 0} {}

  template <class Schedule>
  JGG_HOST_DEVICE int next(Schedule& schedule) {
    if (unit_ < 0) {
      int const all = schedule.cost();
      unit_ = run_.end = schedule.first_unit(begin_of(all, cluster_), before_);
      end_ = begin_of(all, cluster_ + 1);
    }
    if (unit_ == run_.end && !schedule.run(unit_, run_)) return unit_;
    if (cluster_ + 1 < clusters_ && 2 * (end_ - before_) <= run_.cost) return kPastAllUnits;
    before_ += run_.cost;
    return unit_++;
  }

 private:
  // Returns where a cluster's range begins. A unit there may belong to either range.
  JGG_HOST_DEVICE int begin_of(int all, int cluster) const {
    return static_cast<int>(static_cast<long long>(all) * cluster / clusters_);
  }

  int cluster_;
  int clusters_;
  int unit_;    // all units of this cluster before this one are given
  int before_;  // the cost of all units before `unit_`
  int end_;     // where the next cluster's range begins, in costs
  Run run_;
};

// Calls `function` with a cluster's turns. If the schedule has has_few_steps() and it returns true,
// these are the schedule's TurnsOfFewSteps. has_few_steps() is called once here, and not within
// `Turns`, because a call within `Turns` made the compiler put sums of FP8 kernels into registers
// that cannot be read at the same time as the addends.
template <class Turns, class Schedule, class Function>
JGG_HOST_DEVICE void with_turns(Schedule const& schedule, int cluster, int clusters,
                                Function function) {
  if constexpr (requires { schedule.has_few_steps(); }) {
    if (schedule.has_few_steps()) {
      return function(typename Schedule::TurnsOfFewSteps(cluster, clusters));
    }
  }
  function(Turns(cluster, clusters));
}

}  // namespace jgg
