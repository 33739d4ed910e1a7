// The tiles of symmetric results that have too few tiles of triangular.h for all multiprocessors.
// The tiles here are smaller, and each has a thread block of its own. This header is for host and
// device, and uses no CUDA types.
#pragma once

#include <type_traits>

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"
#include "scheduler/triangular.h"
#include "scheduler/turns.h"
#include "scheduler/work_tile.h"

namespace jgg {

// A unit of work is two tiles of kTile x kTile, one for each CTA of a cluster, of two kinds:
//
//   off the diagonal  two tiles that share rows: the rows at `m` in a lower triangle
//   diagonal          the part of a square of two tiles by two that is in the triangle. It has ten
//                     squares of half a tile's rows and columns, five for each CTA. `m` and `n`
//                     are those of the tile off the diagonal. Squares of this tile multiply rows
//                     at `m` by rows at `n`. Squares of the two tiles on the diagonal multiply
//                     rows at `m` by rows at `m`, or rows at `n` by rows at `n`
//
// The diagonal units of a matrix come first, because they are a quarter more work. For the upper
// triangle, the rows and columns of tiles are exchanged.
//
// All loads of a thread block wait until it has found its tile, so tile() has only one division,
// and no square root.
template <int kTile>
class FineTriangularSchedule {
 public:
  template <class Warp, int kMaxClusters>
  using Turns = RoundRobin;

  JGG_HOST_DEVICE FineTriangularSchedule(TriangularStack const* stacks, int count, Uplo uplo)
      : stacks_(stacks), count_(count), uplo_(uplo) {}

  JGG_HOST_DEVICE static int units(TriangularStack const& stack, Uplo) {
    return stack.matrices * Counts(stack.n).units();
  }

  static bool gains_by_halves(TriangularStack const&, Uplo, int) { return false; }

  // Sets `work` to the tile that CTA `rank` of a cluster computes in unit `unit`. Returns false
  // past the last unit.
  JGG_HOST_DEVICE bool tile(int unit, int rank, WorkTile& work) const {
    int const index = find_stack(unit);
    TriangularStack const stack = stacks_[index];
    Counts const counts(stack.n);
    work = {};
    work.group = index;
    work.extent = stack.n;
    work.k_tiles = stack.k_tiles;

    unit -= stack.first_unit;
    work.batch = static_cast<int>(static_cast<unsigned>(unit) / unsigned(counts.units()));
    unit -= work.batch * counts.units();
    bool const lower = uplo_ == Uplo::kLower;
    TriangleEntry at;
    if (unit < counts.squares) {
      at = {2 * unit + 1, 2 * unit};
      work.share = Share::kBoth;
    } else {
      at = off_diagonal(2 * (unit - counts.squares) + rank, counts);
      work.share = lower ? Share::kLhs : Share::kRhs;
    }
    work.m = (lower ? at.row : at.column) * kTile;
    work.n = (lower ? at.column : at.row) * kTile;
    return work.batch < stack.matrices;
  }

 private:
  // Counts of one matrix.
  struct Counts {
    int rows;          // of tiles
    int squares;       // of two tiles by two, on the diagonal
    int off_diagonal;  // pairs of tiles

    JGG_HOST_DEVICE explicit Counts(int n)
        : rows(ceil_div(n, kTile)),
          squares((rows + 1) / 2),
          off_diagonal((rows * (rows - 1) / 2 - rows / 2) / 2) {}

    JGG_HOST_DEVICE int units() const { return squares + off_diagonal; }
  };

  // Returns the place of tile number `tile` off the diagonal. Tiles are counted four to a square,
  // and squares row by row. The last row of squares may have only its upper tiles. The two tiles of
  // a unit, which are consecutive, are therefore in the same row.
  JGG_HOST_DEVICE static TriangleEntry off_diagonal(int tile, Counts const& counts) {
    int const above = (counts.squares - 1) * (counts.squares - 2) / 2 * 4;
    if (tile >= above && counts.rows % 2 == 1) return {counts.rows - 1, tile - above};
    // `column` counts squares from the start of row `row`.
    int row = 0, column = tile / 4;
    while (column > row) column -= ++row;
    return {2 * (row + 1) + tile % 4 / 2, 2 * column + tile % 2};
  }

  // Returns the last stack that begins at or before `unit`.
  JGG_HOST_DEVICE int find_stack(int unit) const {
    int index = 0;
    while (index + 1 < count_ && stacks_[index + 1].first_unit <= unit) ++index;
    return index;
  }

  TriangularStack const* stacks_;
  int count_;
  Uplo uplo_;
};

// The schedule of a tile configuration.
template <int kTileM, int kTileN, int kCluster>
using TriangularScheduleOf = std::conditional_t<kTileM == kTileN, FineTriangularSchedule<kTileM>,
                                                TriangularSchedule<kTileM, kTileN, kCluster>>;

}  // namespace jgg
