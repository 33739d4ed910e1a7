// The tiles of a list of unequal products, ordered so that tiles with the longest mainloop come
// first. The schedule gives square tiles to single thread blocks, without clusters. This header is
// for host and device, and uses no CUDA types.
#pragma once

#include <algorithm>
#include <vector>

#include "scheduler/ceil_div.h"
#include "scheduler/host_device.h"

namespace jgg {

// All tiles of one product with a result [m, n].
struct ProductRun {
  int problem;
  int m;
  int n;
  int first_unit;  // tiles of the runs before this one
  int steps;       // mainloop steps of a tile
};

struct ProductTile {
  int problem;
  int m;      // first row
  int n;      // first column
  int steps;  // 0 for no tile
};

template <int kTile>
class ProductRunSchedule {
 public:
  JGG_HOST_DEVICE ProductRunSchedule(ProductRun const* runs, int count, int units)
      : runs_(runs), count_(count), units_(units) {}

  // Sorts runs by their steps, longest first, and sets their `first_unit`. Returns the number of
  // their tiles.
  static int arrange(std::vector<ProductRun>& runs) {
    std::stable_sort(runs.begin(), runs.end(),
                     [](ProductRun const& a, ProductRun const& b) { return a.steps > b.steps; });
    int units = 0;
    for (ProductRun& run : runs) {
      run.first_unit = units;
      units += ceil_div(run.m, kTile) * ceil_div(run.n, kTile);
    }
    return units;
  }

  // Returns the tile that thread block `block` of `blocks` computes in round `round`. A tile
  // without steps means that the block has no tile in this or a later round. Every other round goes
  // to the blocks in reverse, so that no block always gets the longer tiles.
  JGG_HOST_DEVICE ProductTile tile(int round, int block, int blocks) const {
    int const unit = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    if (unit >= units_) return {};
    int low = 0, high = count_;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (runs_[middle].first_unit <= unit ? low : high) = middle;
    }
    ProductRun const run = runs_[low];
    int const columns = ceil_div(run.n, kTile), index = unit - run.first_unit;
    int const row = index / columns;
    return {run.problem, row * kTile, (index - row * columns) * kTile, run.steps};
  }

 private:
  ProductRun const* runs_;
  int count_;
  int units_;
};

}  // namespace jgg
