// The tiles of symmetric results, of which only one triangle is computed: a closed form from the
// number of a tile to its place, and the schedule built on it. This header is for host and device,
// and uses no CUDA types.
#pragma once

#include <algorithm>
#include <cmath>

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"
#include "scheduler/turns.h"
#include "scheduler/work_tile.h"

namespace jgg {

// The triangle of a symmetric matrix that is computed.
enum class Uplo : int { kLower = 0, kUpper = 1 };

struct TriangleEntry {
  int row;
  int column;
};

// Returns entry t of a lower triangle that is counted row by row: row i begins at i (i + 1) / 2.
// The square root is a float, so near the first entry of a row it can give a neighbouring row.
// Integer comparisons with the beginnings of rows make the result exact for every t >= 0.
JGG_HOST_DEVICE TriangleEntry triangle_entry(int t) {
  auto const begin = [](long long row) { return row * (row + 1) / 2; };
  int row = static_cast<int>((sqrtf(8.0f * t + 1.0f) - 1.0f) * 0.5f);
  if (begin(row) > t) --row;
  if (begin(row + 1) <= t) ++row;
  return {row, t - static_cast<int>(begin(row))};
}

// `matrices` results of [n, n], one after another in memory.
struct TriangularStack {
  int matrices;
  int n;
  int k_tiles;         // mainloop steps of a tile
  int narrow_k_tiles;  // steps of a narrow tile on the diagonal
  int first_unit;      // units of the stacks before this one
  // Whether both CTAs of a cluster take the same narrow tile, half of its steps each.
  bool halves_narrow = false;
};

// The tiles of a list of stacks, for clusters of two CTAs. A tile is twice as wide as high, so the
// two tiles of a cluster, one above the other, make a square macro tile. A unit of work is one tile
// for each CTA of a cluster. There are three kinds of units:
//
//   off the diagonal  both tiles of one macro tile, which share the rhs
//   wide diagonal     the tiles of macro tiles on the diagonal that are needed in full: the lower
//                     tiles in a lower triangle, the upper tiles in an upper triangle
//   narrow diagonal   the other tiles of these macro tiles, of which half the columns are needed
//
// On the diagonal, the CTAs of a unit take tiles of the same kind from two macro tiles, if
// necessary of two matrices, so that neither CTA waits while the other computes more columns.
//
// The wide units of a matrix follow its units off the diagonal, so that they find their operands in
// L2. The narrow units of a stack come last, because short units fill up the last round best. They
// are even shorter if both CTAs of a cluster take the same tile. Each CTA then computes half of the
// tile's steps, and adds up half of its columns. `first_step` is where a CTA's half begins, and
// `partials` is 1. Exchanging sums takes time, so only stacks that are done sooner this way have
// narrow tiles in halves.
//
// For the upper triangle, the rows and columns of macro tiles are exchanged. Padding tiles are the
// only tiles outside of the triangle, and have m >= extent. The lower tile of a macro tile is
// padding if n reaches only into the upper half. If a stack has an odd number of wide tiles, or of
// narrow tiles that are not halved, the second CTA of the last unit of this kind gets padding.
template <int kTileM, int kTileN, int kCluster>
class TriangularSchedule {
 public:
  static_assert(kCluster == 2 && kCluster * kTileM == kTileN, "a cluster's tiles are a square");

  template <class Warp, int kMaxClusters>
  using Turns = EarliestFree<Warp, kMaxClusters>;

  JGG_HOST_DEVICE TriangularSchedule(TriangularStack const* stacks, int count, Uplo uplo)
      : stacks_(stacks), count_(count), uplo_(uplo) {}

  JGG_HOST_DEVICE static int units(TriangularStack const& stack, Uplo uplo) {
    Counts const counts(stack.n, uplo);
    return counts.full_units(stack.matrices) + counts.narrow_units(stack);
  }

  // Returns whether `clusters` clusters that have only this stack are done sooner with its narrow
  // tiles in halves.
  static bool gains_by_halves(TriangularStack stack, Uplo uplo, int clusters) {
    stack.halves_narrow = false;
    int const whole = end_of(stack, uplo, clusters);
    stack.halves_narrow = true;
    return end_of(stack, uplo, clusters) < whole;
  }

  // Sets `work` to the tile that CTA `rank` of a cluster computes in unit `unit`. Returns false
  // past the last unit.
  JGG_HOST_DEVICE bool tile(int unit, int rank, WorkTile& work) const {
    int const index = find_stack(unit);
    TriangularStack const stack = stacks_[index];
    Counts const counts(stack.n, uplo_);
    work = {};
    work.group = index;
    work.extent = stack.n;
    work.k_tiles = stack.k_tiles;
    work.share = Share::kNothing;

    unit -= stack.first_unit;
    int const full_units = counts.full_units(stack.matrices);
    if (unit < full_units) {
      place_full(unit, rank, stack, counts, work);
      return true;
    }
    unit -= full_units;
    if (stack.halves_narrow) {
      work.k_tiles = ceil_div(stack.narrow_k_tiles, kCluster);
      work.first_step = rank * work.k_tiles;
      work.partials = 1;
      place_on_diagonal(unit, stack, counts.narrow, false, work);
    } else {
      work.k_tiles = stack.narrow_k_tiles;
      place_on_diagonal(2 * unit + rank, stack, counts.narrow, false, work);
    }
    return unit < counts.narrow_units(stack);
  }

  // Sets `run` to the full units or to the narrow units of a stack, whichever `unit` belongs to.
  // Returns false past the last unit.
  JGG_HOST_DEVICE bool run(int unit, Run& run) const {
    TriangularStack const stack = stacks_[find_stack(unit)];
    Counts const counts(stack.n, uplo_);
    int const narrow = stack.first_unit + counts.full_units(stack.matrices);
    int const end = narrow + counts.narrow_units(stack);
    run = unit < narrow ? Run{narrow, full_cost(stack)} : Run{end, narrow_cost(stack)};
    return unit < end;
  }

  // Returns whether only the first kTileM columns of a tile are needed.
  JGG_HOST_DEVICE static bool is_narrow(WorkTile const& work, Uplo uplo) {
    bool const is_lower_tile = work.m / kTileM % 2 == 1;
    return work.m == work.n && is_lower_tile == (uplo == Uplo::kUpper);
  }

 private:
  // How many macro tiles off the diagonal, wide tiles and narrow tiles one matrix has.
  struct Counts {
    int off_diagonal;
    int wide;
    int narrow;

    JGG_HOST_DEVICE Counts(int n, Uplo uplo) {
      int const rows = ceil_div(n, kTileM);
      int const upper_tiles = (rows + 1) / 2, lower_tiles = rows / 2;
      off_diagonal = upper_tiles * (upper_tiles - 1) / 2;
      wide = uplo == Uplo::kLower ? lower_tiles : upper_tiles;
      narrow = uplo == Uplo::kLower ? upper_tiles : lower_tiles;
    }

    // Returns the number of full units of `matrices` matrices.
    JGG_HOST_DEVICE int full_units(int matrices) const {
      return matrices * off_diagonal + pairs(matrices * wide);
    }
    JGG_HOST_DEVICE int narrow_units(TriangularStack const& stack) const {
      int const tiles = stack.matrices * narrow;
      return stack.halves_narrow ? tiles : pairs(tiles);
    }
  };

  // Costs of a unit in halves of a K tile: four for the change of tiles, and about six for the
  // fixup. A narrow unit is half as much work as a full one.
  static constexpr int kChange = 4, kExchange = 6;

  JGG_HOST_DEVICE static int full_cost(TriangularStack const& stack) {
    return 2 * stack.k_tiles + kChange;
  }
  JGG_HOST_DEVICE static int narrow_cost(TriangularStack const& stack) {
    return (stack.halves_narrow ? stack.k_tiles / 2 + kExchange : stack.k_tiles) + kChange;
  }

  // Returns when the last cluster is done, if each unit goes to the cluster that is free first. At
  // any time there are two kinds of clusters: some have one full unit more than the others.
  static int end_of(TriangularStack const& stack, Uplo uplo, int clusters) {
    Counts const counts(stack.n, uplo);
    int const full_units = counts.full_units(stack.matrices), cost = narrow_cost(stack);
    int const more = full_units % clusters, less = clusters - more;
    int less_until = full_units / clusters * full_cost(stack);
    int more_until = more > 0 ? less_until + full_cost(stack) : 0;
    int end = std::max(less_until, more_until);
    for (int units = counts.narrow_units(stack); units > 0;) {
      bool const takes_less = more == 0 || less_until <= more_until;
      int& until = takes_less ? less_until : more_until;
      until += cost;
      units -= takes_less ? less : more;
      end = std::max(end, until);
    }
    return end;
  }

  JGG_HOST_DEVICE static int pairs(int tiles) { return (tiles + 1) / 2; }

  // Returns the last stack that begins at or before `unit`.
  JGG_HOST_DEVICE int find_stack(int unit) const {
    int low = 0, high = count_;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (stacks_[middle].first_unit <= unit ? low : high) = middle;
    }
    return low;
  }

  // Places a tile of a unit off the diagonal, or of a wide unit. The units of matrix i follow all
  // units off the diagonal of earlier matrices, and all wide units that are filled by wide tiles of
  // earlier matrices.
  JGG_HOST_DEVICE void place_full(int unit, int rank, TriangularStack const& stack,
                                  Counts const& counts, WorkTile& work) const {
    auto const wide_before = [&](int matrix) { return matrix * counts.wide / 2; };
    auto const before = [&](int matrix) {
      return matrix * counts.off_diagonal + wide_before(matrix);
    };
    int matrix = 2 * unit / (2 * counts.off_diagonal + counts.wide);
    if (before(matrix + 1) <= unit) ++matrix;
    unit -= before(matrix);

    // Past the last matrix there is only a wide tile without a partner.
    int const off_diagonal = matrix < stack.matrices ? counts.off_diagonal : 0;
    if (unit < off_diagonal) {
      place_off_diagonal(unit, rank, work);
      work.batch = matrix;
    } else {
      int const pair = wide_before(matrix) + unit - off_diagonal;
      place_on_diagonal(2 * pair + rank, stack, counts.wide, true, work);
    }
  }

  JGG_HOST_DEVICE void place_off_diagonal(int unit, int rank, WorkTile& work) const {
    TriangleEntry const below = triangle_entry(unit);
    int const far = (below.row + 1) * kTileN, near = below.column * kTileN;
    work.m = (uplo_ == Uplo::kLower ? far : near) + rank * kTileM;
    work.n = uplo_ == Uplo::kLower ? near : far;
    work.share = Share::kRhs;
  }

  // Places tile `index` of all wide tiles, or of all narrow tiles, of the stack. Each matrix has
  // `run` of them.
  JGG_HOST_DEVICE void place_on_diagonal(int index, TriangularStack const& stack, int run,
                                         bool wide, WorkTile& work) const {
    if (index >= stack.matrices * run) {
      work.m = work.n = stack.n;
      return;
    }
    work.batch = index / run;
    int const macro = (index - work.batch * run) * kTileN;
    bool const is_lower_tile = wide == (uplo_ == Uplo::kLower);
    work.m = is_lower_tile ? macro + kTileM : macro;
    work.n = wide ? macro : work.m;
  }

  TriangularStack const* stacks_;
  int count_;
  Uplo uplo_;
};

}  // namespace jgg
