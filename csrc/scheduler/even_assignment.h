// Which units of work a block computes, where all units are cut along K into equal shares.
#pragma once

#include <cstdint>

#include "scheduler/assignment.h"

namespace jgg {

// Lays the units end to end and cuts them into ranges of equal length, one for each cluster: for
// kernels whose time is that of reading operands which no two units share, and whose sums are so
// few that handing them over costs next to nothing. Who waits for whom is as in `Assignment`.
class EvenAssignment {
 public:
  static constexpr int kLeastSteps = 4;  // of a range

  JGG_HOST_DEVICE EvenAssignment(int units, int steps, int cluster, int clusters)
      : steps_(steps), total_(int64_t(units) * steps) {
    int64_t const most = total_ / kLeastSteps;
    ranges_ = total_ == 0 ? 0 : most < 1 ? 1 : most < clusters ? int(most) : clusters;
    if (cluster >= ranges_) return;
    range_ = ranges_ - 1 - cluster;
    begin_ = at(range_);
    end_ = at(range_ + 1);
  }

  // The next piece of this cluster; false after the last one.
  JGG_HOST_DEVICE bool next(Piece& piece) {
    if (begin_ == end_) return false;
    int const unit = int(begin_ / steps_), first = int(begin_ - int64_t(unit) * steps_);
    int64_t const unit_end = int64_t(unit + 1) * steps_;
    int64_t const last = unit_end < end_ ? unit_end : end_;
    piece = {unit, first, int(last - begin_), 0};
    if (first > 0) {
      piece.partials = kHandsOver;
    } else {
      while (range_ + 1 + piece.partials < ranges_ && at(range_ + 1 + piece.partials) < unit_end &&
             last < unit_end) {
        ++piece.partials;
      }
    }
    begin_ = last;
    return true;
  }

  // Clusters that have work.
  JGG_HOST_DEVICE int busy() const { return ranges_; }

 private:
  JGG_HOST_DEVICE int64_t at(int range) const {
    return total_ / ranges_ * range + total_ % ranges_ * range / ranges_;
  }

  int steps_;
  int64_t total_;
  int ranges_;
  int range_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace jgg
