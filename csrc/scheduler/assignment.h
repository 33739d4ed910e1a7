// Assigns units of work to a cluster if the last wave is cut along K (stream-K).
#pragma once

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"

namespace jgg {

// The value of `partials` if a cluster hands its sum over to another cluster.
constexpr int kHandsOver = -1;

// Consecutive steps of one unit, computed by one cluster.
struct Piece {
  int unit;
  int first_step;
  int steps;
  // How many of the clusters just before this cluster hand over sums of the unit's later steps. The
  // nearest cluster has the steps that come next. This cluster adds these sums to its own and
  // stores the result. If this cluster hands its sum over, the value is kHandsOver.
  int partials;
};

// Deals `units` units of `steps` steps each to the clusters of a persistent grid. Full waves, in
// which each cluster gets a whole unit, are not cut. Their clusters read the same part of K at the
// same time, and so share operands in L2. The units of the last, partial wave are laid end to end
// and cut into ranges of equal length, one for each cluster that takes part. A range is at most a
// unit long, so it lies in one unit, or in the end of a unit and the beginning of the next unit.
//
// The cluster with a unit's first steps stores the unit, and needs the sums of the clusters with
// its other steps. Ranges are dealt from the last to the first, so a cluster waits only for
// clusters before it in the grid, and each of these clusters hands over its sum before it waits for
// anything itself. Devices start the thread blocks of a grid in the order of their numbers. CUDA
// does not promise this order, but much code relies on it. A cluster that another cluster waits for
// is therefore done or running, even if other kernels hold part of the device.
class Assignment {
 public:
  // Cutting must save this many K tiles, because the fixup takes time. A multiprocessor needs the
  // time of about two to three steps to write the 128 KB of a tile, and as long again to read them.
  static constexpr int kWorthwhile = 16;

  // The most clusters that share a unit of the last wave. A launch of few units has a grid of this
  // many clusters per unit.
  static constexpr int kClustersAUnit = 4;

  JGG_HOST_DEVICE Assignment(int units, int steps, int cluster, int clusters)
      : steps_(steps), clusters_(clusters), unit_(cluster), whole_end_(units), range_left_(0) {
    int const in_last_wave = units % clusters;
    busy_ = in_last_wave;
    int const ranges = ranges_of(in_last_wave, clusters);
    if (ranges == 0) return;
    Cuts const cuts{in_last_wave, steps, ranges};
    if (steps - cuts.longest() < kWorthwhile) return;
    whole_end_ = units - in_last_wave;
    busy_ = ranges;
    if (cluster >= ranges) return;

    int const range = ranges - 1 - cluster;
    unsigned const begin = cuts.at(range), end = cuts.at(range + 1);
    range_left_ = end - begin;
    range_unit_ = whole_end_ + begin / steps;
    range_step_ = begin % steps;
    // Count the later ranges that begin inside the last unit of this range.
    while (cuts.at(range + 1 + partials_) / steps == (end - 1) / steps) ++partials_;
  }

  // Sets `piece` to the next piece of this cluster. Returns false after the last piece.
  JGG_HOST_DEVICE bool next(Piece& piece) {
    if (unit_ < whole_end_) {
      piece = {unit_, 0, steps_, 0};
      unit_ += clusters_;
      return true;
    }
    if (range_left_ == 0) return false;
    int const to_end = steps_ - range_step_;
    int const steps = to_end < range_left_ ? to_end : range_left_;
    range_left_ -= steps;
    piece = {range_unit_, range_step_, steps,
             range_step_ > 0    ? kHandsOver
             : range_left_ == 0 ? partials_
                                : 0};
    ++range_unit_;
    range_step_ = 0;
    return true;
  }

  // Returns the number of clusters that have work in the last wave.
  JGG_HOST_DEVICE int busy() const { return busy_; }

 private:
  // Returns how many ranges the units of a partial wave are cut into, or 0 if the wave is nearly
  // full. The ratios of ranges to units have small numerators and denominators, so that
  // neighbouring clusters still read the same parts of K.
  JGG_HOST_DEVICE static int ranges_of(int units, int clusters) {
    if (units == 0) return 0;
    if (units * kClustersAUnit <= clusters) return units * kClustersAUnit;
    if (units * 3 <= clusters) return units * 3;
    if (units * 2 <= clusters) return units * 2;
    if (units * 3 / 2 <= clusters) return units * 3 / 2;
    if (units * 4 / 3 <= clusters) return units * 4 / 3;
    return 0;
  }

  // The bounds of ranges, in steps from the first unit of the wave. All numbers fit into 32 bits
  // for up to 127 clusters, whatever K.
  struct Cuts {
    int units;
    int steps;
    int ranges;

    // Returns units * steps * range / ranges, without a product that overflows.
    JGG_HOST_DEVICE unsigned at(int range) const {
      unsigned const share = unsigned(units) * range;
      return share * (steps / ranges) + share * (steps % ranges) / ranges;
    }
    JGG_HOST_DEVICE int longest() const {
      return units * (steps / ranges) + ceil_div(units * (steps % ranges), ranges);
    }
  };

  int steps_;
  int clusters_;
  int unit_;        // the next whole unit
  int whole_end_;   // units from here on are cut
  int range_left_;  // steps of this cluster's range that are still to come
  int range_unit_ = 0;
  int range_step_ = 0;
  int partials_ = 0;  // of the range's last piece, if this piece begins a unit
  int busy_;
};

}  // namespace jgg
