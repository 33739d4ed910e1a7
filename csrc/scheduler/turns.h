// Which cluster takes which unit of work. Nothing is counted in memory, which would have to be
// reset before each launch: every cluster works out the turns of all, so the same sizes always give
// the same turns.
#pragma once

#include "scheduler/host_device.h"
#include "scheduler/warp.h"

namespace jgg {

// Consecutive units that cost the same.
struct Run {
  int end;   // the unit after the last one
  int cost;  // of each, in any measure of time
};

// In turn, for units of equal cost.
class RoundRobin {
 public:
  JGG_HOST_DEVICE RoundRobin(int cluster, int clusters) : unit_(cluster), clusters_(clusters) {}

  // The next unit of this cluster, past the last of the schedule if there is none left.
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

  // Gives a unit to the cluster that is free first, and says which that is.
  JGG_HOST_DEVICE int give(int cost) {
    int const first = Warp::min(over_slots([](int a, int b) { return a < b ? a : b; }));
    int const added = packed(cost);
    // No other entry equals `first`: the number of the cluster is a part of it.
    map([=](int load) { return load == first ? load + added : load; });
    if (first >= kRebase) map([=](int load) { return load == kNone ? load : load - kRebase; });
    return first % kIds;
  }

  // Gives every cluster a unit, if units of this cost would go to each of them once before any gets
  // a second one, and returns how many there are; else 0. `place` is that of `cluster` in the
  // order.
  JGG_HOST_DEVICE int give_all(int cost, int cluster, int& place) {
    auto const last_of = [](int a, int b) { return b == kNone || (a > b && a != kNone) ? a : b; };
    auto const negated = [](int load) { return load == kNone ? 0 : -load; };
    int const first = Warp::min(over_slots([](int a, int b) { return a < b ? a : b; }));
    int const last = -Warp::min(Warp::map(negated, over_slots(last_of)));
    int const added = packed(cost);
    // Without the numbers of the clusters: at equal loads they would decide.
    if (last / kIds - first / kIds >= added / kIds || first >= kRebase) return 0;

    int own = 0, clusters = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      if (cluster / kWarpSize == slot) own = Warp::read(loads_[slot], cluster % kWarpSize);
    }
    place = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      place += Warp::count(Warp::map([=](int load) { return int(load < own); }, loads_[slot]));
      clusters += Warp::count(Warp::map([](int load) { return int(load != kNone); }, loads_[slot]));
    }
    map([=](int load) { return load == kNone ? load : load + added; });
    return clusters;
  }

 private:
  static constexpr int kSlots = (kMaxClusters + kWarpSize - 1) / kWarpSize;
  static constexpr int kIds = 256;  // a load is packed above the number of its cluster
  static_assert(kMaxClusters <= kIds);
  static constexpr int kNone = 0x7fffffff;
  // Loads never differ by more than the largest cost, so what all clusters have in common is taken
  // off before it overflows.
  static constexpr int kMaxCost = 1 << 21;
  static constexpr int kRebase = (1 << 21) * kIds;

  JGG_HOST_DEVICE static int packed(int cost) { return (cost < kMaxCost ? cost : kMaxCost) * kIds; }

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

// For units of unequal cost: each goes to the cluster that is free first. The schedule says what
// they cost: bool run(unit, run), false past the last unit.
template <class Warp, int kMaxClusters>
class EarliestFree {
 public:
  JGG_HOST_DEVICE EarliestFree(int cluster, int clusters)
      : cluster_(cluster), unit_(0), run_{0, 0}, loads_(clusters) {}

  template <class Schedule>
  JGG_HOST_DEVICE int next(Schedule& schedule) {
    while (true) {
      if (unit_ == run_.end && !schedule.run(unit_, run_)) return unit_;
      int place, given = 0;
      if (run_.end - unit_ >= kMaxClusters) given = loads_.give_all(run_.cost, cluster_, place);
      if (given > 0) {
        unit_ += given;
        return unit_ - given + place;
      }
      int const owner = loads_.give(run_.cost);
      ++unit_;
      if (owner == cluster_) return unit_ - 1;
    }
  }

 private:
  int cluster_;
  int unit_;  // all before it are given
  Run run_;
  Loads<Warp, kMaxClusters> loads_;
};

}  // namespace jgg
