// The tiles of symmetric results in runs of equal cost, longest first. The schedule gives square
// tiles to single thread blocks, without clusters. This header is for host and device, and uses no
// CUDA types.
#pragma once

#include <algorithm>
#include <vector>

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"
#include "scheduler/triangular.h"

namespace jgg {

// All tiles of a stack on the diagonal, or all its tiles off the diagonal.
struct TriangularRun {
  int stack;
  int n;           // of the stack's results [n, n]
  int first_unit;  // tiles of the runs before this one
  int steps;       // mainloop steps of a tile
  bool diagonal;
};

struct TriangularTile {
  int stack;
  int matrix;
  int m;      // first row
  int n;      // first column
  int steps;  // 0 for no tile
  bool diagonal;
};

// The sizes of a stack that the schedule needs.
struct TriangularWork {
  int matrices;
  int n;
  int steps;           // of a tile off the diagonal
  int diagonal_steps;  // of a tile on the diagonal
};

template <int kTile>
class TriangularRunSchedule {
 public:
  JGG_HOST_DEVICE TriangularRunSchedule(TriangularRun const* runs, int count, int units, Uplo uplo)
      : runs_(runs), count_(count), units_(units), uplo_(uplo) {}

  // Returns the runs of a list of stacks, and sets `units` to the number of their tiles. Runs of
  // longer tiles come first, so that blocks that take tiles in turn are done at nearly the same
  // time.
  static std::vector<TriangularRun> runs(std::vector<TriangularWork> const& stacks, int& units) {
    std::vector<TriangularRun> runs;
    for (int i = 0; i < static_cast<int>(stacks.size()); ++i) {
      TriangularWork const& stack = stacks[i];
      if (stack.n > kTile) runs.push_back({i, stack.n, 0, stack.steps, false});
      runs.push_back({i, stack.n, 0, stack.diagonal_steps, true});
    }
    std::stable_sort(runs.begin(), runs.end(), [](TriangularRun const& a, TriangularRun const& b) {
      return a.steps > b.steps;
    });
    units = 0;
    for (TriangularRun& run : runs) {
      run.first_unit = units;
      units += stacks[run.stack].matrices * tiles_of_matrix(run);
    }
    return runs;
  }

  // Returns the tile that thread block `block` of `blocks` computes in round `round`. A tile
  // without steps means that the block has no tile in this or a later round. Blocks take turns,
  // every other turn in reverse, so that no block always gets the longer tiles.
  //
  // A block first computes the tile of its last turn. If there are short tiles, this tile is short,
  // and puts the block out of step with blocks that have only long tiles. If all blocks stored
  // their results at the same time, they would wait for memory, which would be idle in between.
  JGG_HOST_DEVICE TriangularTile tile(int round, int block, int blocks) const {
    int const full_turns = units_ / blocks;
    int const turns = full_turns + int(place(full_turns, block, blocks) < units_ % blocks);
    if (round >= turns) return {};
    int const turn = round == 0 ? turns - 1 : round - 1;
    int const unit = turn * blocks + place(turn, block, blocks);
    TriangularRun const run = runs_[find_run(unit)];
    int const of_matrix = tiles_of_matrix(run);
    int const matrix = (unit - run.first_unit) / of_matrix;
    int const index = unit - run.first_unit - matrix * of_matrix;
    TriangleEntry const entry = run.diagonal ? TriangleEntry{index, index} : below(index);
    bool const lower = uplo_ == Uplo::kLower;
    return {run.stack,
            matrix,
            (lower ? entry.row : entry.column) * kTile,
            (lower ? entry.column : entry.row) * kTile,
            run.steps,
            run.diagonal};
  }

 private:
  // Returns the place of a block among all blocks in a turn.
  JGG_HOST_DEVICE static int place(int turn, int block, int blocks) {
    return turn % 2 == 0 ? block : blocks - 1 - block;
  }

  JGG_HOST_DEVICE static int tiles_of_matrix(TriangularRun const& run) {
    int const rows = ceil_div(run.n, kTile);
    return run.diagonal ? rows : rows * (rows - 1) / 2;
  }

  // Returns an entry off the diagonal. The entries off the diagonal form a triangle that begins one
  // row further down.
  JGG_HOST_DEVICE static TriangleEntry below(int index) {
    TriangleEntry const entry = triangle_entry(index);
    return {entry.row + 1, entry.column};
  }

  // Returns the last run that begins at or before `unit`.
  JGG_HOST_DEVICE int find_run(int unit) const {
    int low = 0, high = count_;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (runs_[middle].first_unit <= unit ? low : high) = middle;
    }
    return low;
  }

  TriangularRun const* runs_;
  int count_;
  int units_;
  Uplo uplo_;
};

}  // namespace jgg
