// Finds the group that owns a unit of work, for group sizes that only the device knows.
#pragma once

#include "scheduler/group_sizes.h"
#include "scheduler/host_device.h"
#include "scheduler/warp.h"

namespace jgg {

// A run of consecutive rows that belong to one group.
struct Segment {
  int batch;
  int local_group;  // outside [0, local_groups) for rows that no local group owns
  int begin;
  int extent;
  int stored_begin;  // where its rows start in memory if groups are padded
  int first_unit;    // the number of this segment's first unit
};

// Walks forward over the segments of every batch, a warp's width at a time. Finding a group takes a
// few instructions per tile, however many groups there are, and no table in shared memory.
// units(local_group, begin, end) returns the number of units of work of a segment. `Units` may have
// local_only(), which returns whether only local groups have units. `Units` may also have second(),
// which has the arguments of units() and returns the number of units of a second kind, which are
// numbered separately. If groups are padded in memory, each starts at a multiple of kPad rows. With
// kHotFirst, the segments of more than `hot_rows` rows come before all others.
//
// A batch has a segment for each group, and for each local group whose global index does not exist
// (such a group owns no rows). The last segment has the rows that no group owns. The cursor makes
// sizes safe: a negative size counts as zero, and the running sum never passes `rows`.
template <class Warp, class Units, int kPad = 1, bool kHotFirst = false>
class SegmentCursor {
 public:
  using Int = typename Warp::Int;
  static constexpr bool kHasSecond = requires(Units units) { units.second(0, 0, 0); };

  JGG_HOST_DEVICE SegmentCursor(GroupSizes const& groups, Units const& units, int hot_rows = 0)
      : groups_(groups),
        units_(units),
        hot_rows_(hot_rows),
        at_hot_(kHotFirst && hot_rows < groups.rows),
        batch_(0),
        units_before_(0),
        second_before_(0) {
    enter_batch();
    load_window();
  }

  // Goes back to the first segment, with other numbers of units.
  JGG_HOST_DEVICE void restart(Units const& units) {
    units_ = units;
    at_hot_ = kHotFirst && hot_rows_ < groups_.rows;
    batch_ = 0;
    units_before_ = 0;
    second_before_ = 0;
    enter_batch();
    load_window();
  }

  // Returns the number of units. Call it before the first call of seek().
  JGG_HOST_DEVICE int count() {
    bool moved = false;
    while (next_window()) moved = true;
    int const units = units_before_ + Warp::read(units_end_, kWarpSize - 1);
    if (moved) restart(units_);
    return units;
  }

  // Finds the segment that owns `unit`. Returns false past the last unit. `unit` must not be less
  // than in earlier calls.
  JGG_HOST_DEVICE bool seek(int unit, Segment& segment) {
    while (unit - units_before_ >= Warp::read(units_end_, kWarpSize - 1)) {
      if (!next_window()) return false;
    }
    int const target = unit - units_before_;
    segment = segment_of(
        Warp::first(Warp::map([target](int end) { return int(target < end); }, units_end_)));
    return true;
  }

  // Finds the first segment that owns `unit` or the unit `second` of the second kind, and sets
  // `is_second` to whether it owns only the latter. `first_unit` is then of the second kind.
  // Returns false past the last units of both kinds. Neither number must be less than in earlier
  // calls.
  JGG_HOST_DEVICE bool seek(int unit, int second, Segment& segment, bool& is_second) {
    auto const lane_of = [](int unit, int before, Int const& ends) {
      int const target = unit - before;
      return Warp::first(Warp::map([target](int end) { return int(target < end); }, ends));
    };
    while (true) {
      int const of_first = lane_of(unit, units_before_, units_end_);
      int const of_second = lane_of(second, second_before_, second_end_);
      is_second = of_second < of_first;
      int const lane = is_second ? of_second : of_first;
      if (lane < kWarpSize) {
        segment = segment_of(lane);
        if (is_second) {
          segment.first_unit = second_before_ + (lane == 0 ? 0 : Warp::read(second_end_, lane - 1));
        }
        return true;
      }
      if (!next_window()) return false;
    }
  }

  // Finds the first segment at whose end all units so far cost more than `cost`. Each unit of a
  // segment costs cost_of(extent). `before` becomes the cost of all units before the segment.
  // Returns false if all units cost at most `cost`. Call it before the first call of seek().
  template <class CostOf>
  JGG_HOST_DEVICE bool seek_cost(int cost, CostOf cost_of, Segment& segment, int& before) {
    before = 0;
    while (true) {
      Int const costs =
          Warp::map([=](int begin, int end, int first_unit,
                        int units_end) { return (units_end - first_unit) * cost_of(end - begin); },
                    Warp::shift_up(rows_end_, rows_before_), rows_end_,
                    Warp::shift_up(units_end_, 0), units_end_);
      Int const ends = Warp::scan(costs, [](int a, int b) { return a + b; });
      int const target = cost - before;
      int const lane =
          Warp::first(Warp::map([target](int end) { return int(target < end); }, ends));
      if (lane < kWarpSize) {
        if (lane > 0) before += Warp::read(ends, lane - 1);
        segment = segment_of(lane);
        return true;
      }
      before += Warp::read(ends, kWarpSize - 1);
      if (!next_window()) return false;
    }
  }

 private:
  JGG_HOST_DEVICE Segment segment_of(int lane) const {
    Segment segment;
    segment.batch = batch_;
    segment.local_group = window_ + lane - offset_;
    segment.begin = lane == 0 ? rows_before_ : Warp::read(rows_end_, lane - 1);
    segment.extent = Warp::read(rows_end_, lane) - segment.begin;
    segment.stored_begin = segment.begin;
    if constexpr (kPad > 1) {
      segment.stored_begin = stored_before_ + (lane == 0 ? 0 : Warp::read(stored_end_, lane - 1));
    }
    segment.first_unit = units_before_ + (lane == 0 ? 0 : Warp::read(units_end_, lane - 1));
    return segment;
  }

  JGG_HOST_DEVICE static int clamp(int value, int low, int high) {
    return value < low ? low : value > high ? high : value;
  }

  // Segments are numbered by global group. Local groups without a global group may have negative
  // numbers.
  JGG_HOST_DEVICE void enter_batch() {
    offset_ = clamp(groups_.offset[batch_ * groups_.offset_batch_stride], -groups_.local_groups,
                    groups_.groups);
    window_ = offset_ < 0 ? offset_ : 0;
    int const local_end = offset_ + groups_.local_groups;
    rest_ = local_end > groups_.groups ? local_end : groups_.groups;
    last_ = rest_;
    if constexpr (requires { units_.local_only(); }) {
      if (units_.local_only()) last_ = local_end - 1;
    }
    rows_before_ = 0;
    stored_before_ = 0;
  }

  JGG_HOST_DEVICE bool next_window() {
    if (window_ + kWarpSize <= last_) {
      rows_before_ = Warp::read(rows_end_, kWarpSize - 1);
      if constexpr (kPad > 1) stored_before_ += Warp::read(stored_end_, kWarpSize - 1);
      units_before_ += Warp::read(units_end_, kWarpSize - 1);
      if constexpr (kHasSecond) second_before_ += Warp::read(second_end_, kWarpSize - 1);
      window_ += kWarpSize;
    } else {
      bool const again = kHotFirst && at_hot_;
      if (batch_ + 1 == groups_.batches && !again) return false;
      units_before_ += Warp::read(units_end_, kWarpSize - 1);
      if constexpr (kHasSecond) second_before_ += Warp::read(second_end_, kWarpSize - 1);
      ++batch_;
      if (batch_ == groups_.batches) {
        batch_ = 0;
        at_hot_ = false;
      }
      enter_batch();
    }
    load_window();
    return true;
  }

  JGG_HOST_DEVICE void load_window() {
    int const* sizes = groups_.sizes + static_cast<long long>(batch_) * groups_.sizes_batch_stride;
    int const rows = groups_.rows, groups = groups_.groups;
    int const window = window_, offset = offset_, rest = rest_, before = rows_before_;
    int const hot_rows = hot_rows_;
    bool const hot = at_hot_;
    Units const units = units_;

    auto const size_of = [=](int lane) {
      int const segment = window + lane;
      if (segment == rest) return rows;
      return segment >= 0 && segment < groups ? clamp(sizes[segment], 0, rows) : 0;
    };
    // No term passes `rows`, so the sum cannot overflow an unsigned int before it is cut to `rows`.
    auto const add_saturating = [=](int a, int b) {
      unsigned const sum = unsigned(a) + unsigned(b);
      return sum < unsigned(rows) ? int(sum) : rows;
    };
    auto const units_of = [=](int lane, int begin, int end) {
      int const segment = window + lane;
      if (segment > rest) return 0;
      if (kHotFirst && hot != (end - begin > hot_rows)) return 0;
      return units(segment - offset, begin, end);
    };
    auto const add = [](int a, int b) { return a + b; };

    Int const within = Warp::scan(Warp::map(size_of, Warp::lanes()), add_saturating);
    rows_end_ = Warp::map([=](int end) { return add_saturating(before, end); }, within);
    Int const rows_begin = Warp::shift_up(rows_end_, before);
    units_end_ = Warp::scan(Warp::map(units_of, Warp::lanes(), rows_begin, rows_end_), add);
    if constexpr (kHasSecond) {
      static_assert(!kHotFirst);
      auto const second_of = [=](int lane, int begin, int end) {
        int const segment = window + lane;
        return segment > rest ? 0 : units.second(segment - offset, begin, end);
      };
      second_end_ = Warp::scan(Warp::map(second_of, Warp::lanes(), rows_begin, rows_end_), add);
    }
    if constexpr (kPad > 1) {
      auto const padded = [](int begin, int end) { return (end - begin + kPad - 1) / kPad * kPad; };
      stored_end_ = Warp::scan(Warp::map(padded, rows_begin, rows_end_), add);
    }
  }

  GroupSizes const& groups_;
  Units units_;
  int hot_rows_;  // segments of more rows come first; `rows` if none does
  bool at_hot_;   // whether the cursor is at segments that come first
  int batch_;
  int offset_;         // group_offset of this batch, clamped to [-local_groups, groups]
  int rest_;           // the segment of the rows that no group owns, the last of the batch
  int last_;           // no later segment has units
  int window_;         // the segment of lane 0
  int rows_before_;    // rows of this batch before the window
  int stored_before_;  // the same rows, with the padding of groups
  int units_before_;   // units of all batches before the window
  int second_before_;  // the same for units of the second kind
  Int rows_end_;       // per lane: where the segment's rows end
  Int stored_end_;     // per lane: rows of the window with padding, up to and with the segment
  Int units_end_;      // per lane: units of the window up to and with the segment
  Int second_end_;     // per lane: the same for units of the second kind
};

}  // namespace jgg
