// The tiles of symmetric results where there are too few of those in triangular.h for all
// multiprocessors: smaller ones, for blocks that work on their own. Host and device, no CUDA types.
#pragma once

#include <type_traits>

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"
#include "scheduler/triangular.h"
#include "scheduler/turns.h"
#include "scheduler/work_tile.h"

namespace jgg {

// A unit of work is one of two kinds:
//
//   off the diagonal  a tile of kTile x kTile
//   diagonal          half of what a square of two tiles by two has of the triangle. In strips of
//                     half a tile's rows that is ten squares, five of which are one unit
//
// Both multiply the rows of two tiles with each other, those at `m` and those at `n` of the work
// tile, so both load the same: the squares of a diagonal unit that are on the diagonal tiles
// themselves multiply rows at `m`, or at `n`, by rows of the same tile. Of the two halves of a
// square, the first has the `m` and `n` of the tile off the diagonal, the second has them the other
// way round.
//
// Diagonal units, which are a quarter more work, come first. For the upper triangle the rows and
// columns of tiles change places.
template <int kTile>
class FineTriangularSchedule {
 public:
  template <class Warp, int kMaxClusters>
  using Turns = RoundRobin;

  JGG_HOST_DEVICE FineTriangularSchedule(TriangularStack const* stacks, int count, Uplo uplo)
      : stacks_(stacks), count_(count), uplo_(uplo) {}

  JGG_HOST_DEVICE static int units(TriangularStack const& stack, Uplo) {
    Counts const counts(stack.n);
    return stack.matrices * (2 * counts.squares + counts.off_diagonal);
  }

  static bool gains_by_halves(TriangularStack const&, Uplo, int) { return false; }

  // The tile of unit `unit`; false past the last one.
  JGG_HOST_DEVICE bool tile(int unit, int, WorkTile& work) const {
    int const index = find_stack(unit);
    TriangularStack const stack = stacks_[index];
    Counts const counts(stack.n);
    work = {};
    work.group = index;
    work.extent = stack.n;
    work.k_tiles = stack.k_tiles;
    work.share = Share::kNothing;

    unit -= stack.first_unit;
    int const diagonal = stack.matrices * 2 * counts.squares;
    TriangleEntry at;
    if (unit < diagonal) {
      work.batch = unit / (2 * counts.squares);
      unit -= work.batch * 2 * counts.squares;
      int const first = unit / 2 * 2, second_half = unit % 2;
      at = {first + 1 - second_half, first + second_half};
    } else {
      unit -= diagonal;
      work.batch = counts.off_diagonal > 0 ? unit / counts.off_diagonal : stack.matrices;
      at = off_diagonal(unit - work.batch * counts.off_diagonal, counts);
    }
    bool const lower = uplo_ == Uplo::kLower;
    work.m = (lower ? at.row : at.column) * kTile;
    work.n = (lower ? at.column : at.row) * kTile;
    return work.batch < stack.matrices;
  }

  JGG_HOST_DEVICE static bool is_diagonal(WorkTile const& work) {
    return work.m / (2 * kTile) == work.n / (2 * kTile);
  }

  // Of a diagonal unit: 0 or 1.
  JGG_HOST_DEVICE static int half(WorkTile const& work, Uplo uplo) {
    return (work.m < work.n) == (uplo == Uplo::kLower) ? 1 : 0;
  }

 private:
  // Of one matrix.
  struct Counts {
    int rows;          // of tiles
    int squares;       // of two tiles by two, on the diagonal
    int off_diagonal;  // tiles

    JGG_HOST_DEVICE explicit Counts(int n)
        : rows(ceil_div(n, kTile)),
          squares((rows + 1) / 2),
          off_diagonal(rows * (rows - 1) / 2 - rows / 2) {}
  };

  // Tiles are counted four to a square, and squares row by row; the last row of squares may have
  // their upper tiles alone.
  JGG_HOST_DEVICE static TriangleEntry off_diagonal(int tile, Counts const& counts) {
    int const above = (counts.squares - 1) * (counts.squares - 2) / 2 * 4;
    if (tile >= above && counts.rows % 2 == 1) return {counts.rows - 1, tile - above};
    TriangleEntry const square = triangle_entry(tile / 4);
    return {2 * (square.row + 1) + tile % 4 / 2, 2 * square.column + tile % 2};
  }

  // The last stack that begins at or before `unit`.
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
using TriangularScheduleOf = std::conditional_t<kCluster == 1, FineTriangularSchedule<kTileM>,
                                                TriangularSchedule<kTileM, kTileN, kCluster>>;

}  // namespace jgg
