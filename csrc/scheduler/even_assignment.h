// Assigns units of work to a cluster if all units are cut along K into equal shares.
#pragma once

#include <cstdint>

#include "scheduler/assignment.h"

namespace jgg {

// Lays the units end to end and cuts them into ranges of equal length, one for each cluster. This
// is for kernels that spend their time on reading operands, share no operands between units, and
// have so few sums that handing them over takes almost no time. Clusters wait for each other as in
// `Assignment`. Units of at most kMostSteps steps are not cut if there are at most as many units as
// clusters, and at least a third as many. Then no cluster waits.
class EvenAssignment {
 public:
  static constexpr int kLeastSteps = 4;    // of a range
  static constexpr int kMostSteps = 32;    // of a unit that is not cut
  static constexpr int kMostClusters = 3;  // the most for each unit, if units are not cut

  JGG_HOST_DEVICE EvenAssignment(int units, int steps, int cluster, int clusters) : steps_(steps) {
    bool const whole =
        steps <= kMostSteps && units <= clusters && units * kMostClusters >= clusters;
    int64_t const total = int64_t(units) * steps, shares = whole ? units : total / kLeastSteps;
    ranges_ = total == 0 ? 0 : shares < 1 ? 1 : shares < clusters ? int(shares) : clusters;
    if (cluster >= ranges_) return;
    share_ = total / ranges_;
    longer_ = int(total - share_ * ranges_);
    range_ = ranges_ - 1 - cluster;
    begin_ = at(range_);
    end_ = at(range_ + 1);
    unit_ = int(begin_ / steps);
    unit_end_ = (int64_t(unit_) + 1) * steps;
  }

  // Sets `piece` to the next piece of this cluster. Returns false after the last piece.
  JGG_HOST_DEVICE bool next(Piece& piece) {
    if (begin_ == end_) return false;
    int64_t const last = unit_end_ < end_ ? unit_end_ : end_;
    int const first = steps_ - int(unit_end_ - begin_);
    piece = {unit_++, first, int(last - begin_), 0};
    if (first > 0) {
      piece.partials = kHandsOver;
    } else if (last < unit_end_) {
      while (range_ + 1 + piece.partials < ranges_ && at(range_ + 1 + piece.partials) < unit_end_) {
        ++piece.partials;
      }
    }
    begin_ = last;
    unit_end_ += steps_;
    return true;
  }

  // Returns the number of clusters that have work.
  JGG_HOST_DEVICE int busy() const { return ranges_; }

 private:
  // Returns the start of a range, without a division, because 64-bit divisions for each range
  // delayed the first tile by a microsecond.
  JGG_HOST_DEVICE int64_t at(int range) const {
    return share_ * range + (range < longer_ ? range : longer_);
  }

  int steps_;
  int ranges_;
  int64_t share_ = 0;  // steps of a range
  int longer_ = 0;     // the first `longer_` ranges have one step more
  int range_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int unit_ = 0;  // the unit of `begin_`
  int64_t unit_end_ = 0;
};

}  // namespace jgg
