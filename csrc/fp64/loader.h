// Copies the operands of all steps of a block's tiles into the stages, as many steps ahead as there
// are stages, across the ends of tiles: the first steps of the next tile are on their way while the
// last one is being stored.
#pragma once

#include "fp64/instructions.h"
#include "fp64/kernel_config.h"
#include "fp64/shared_layout.h"
#include "scheduler/ceil_div.h"

namespace jgg::fp64 {

// One operand of a product, from a tile's first row on.
template <class Element>
struct Panel {
  Element const* matrix;  // [rows, k], or [k, rows] if transposed
  int first_row;
  int rows;
};

template <class Element>
struct Panels {
  Panel<Element> lhs;
  Panel<Element> rhs;
  int k;
};

// What one thread copies of both operands: a unit of every kRowsPerPass-th row of each stage, in
// the order of memory, where rows are those of the operand or, if transposed, values of k.
template <class Config>
class PanelsCursor {
  using Element = typename Config::Element;
  using Layout = PanelLayout<Config>;
  static constexpr bool kTransposed = Config::kTransposed;
  static constexpr int kUnit = Config::kUnitBytes / sizeof(Element);
  static constexpr int kColumns = kTransposed ? Config::kTile : Config::kTileK;
  static constexpr int kRows = kTransposed ? Config::kTileK : Config::kTile;
  static constexpr int kUnitsInRow = kColumns / kUnit;
  static constexpr int kRowsPerPass = Config::kThreads / kUnitsInRow;

 public:
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kPasses * kRowsPerPass == kRows && kPasses % Config::kGroups == 0);

  __device__ void start(Panels<Element> const& panels) {
    int const first_k = kTransposed ? row() : column();
    k_left_ = panels.k - first_k;
    start(0, panels.lhs, panels.k, first_k);
    start(1, panels.rhs, panels.k, first_k);
  }

  // To the next step.
  __device__ void advance() {
    k_left_ -= Config::kTileK;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      from_[side] += kTransposed ? int64_t(Config::kTileK) * pitch_[side] : Config::kTileK;
    }
  }

  // What is outside of the operand is zero in the stage.
  __device__ void copy(uint8_t* stage, int pass) const {
    int const down = pass * kRowsPerPass;
    int const first =
        kTransposed ? Layout::offset(column(), row()) : Layout::offset(row(), column());
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      bool const inside = kTransposed ? k_left_ > down && rows_left_[side] > 0
                                      : k_left_ > 0 && rows_left_[side] > down;
      copy_async<Config::kUnitBytes>(
          stage + side * Config::kPanelBytes + Layout::further_down(first, down),
          from_[side] + int64_t(down) * pitch_[side], inside);
    }
  }

 private:
  __device__ static int row() { return threadIdx.x / kUnitsInRow; }
  __device__ static int column() { return threadIdx.x % kUnitsInRow * kUnit; }

  __device__ void start(int side, Panel<Element> const& panel, int k, int first_k) {
    int const row_in_tile = kTransposed ? column() : row();
    int const first_row = panel.first_row + row_in_tile;
    rows_left_[side] = panel.rows - first_row;
    pitch_[side] = kTransposed ? panel.rows : k;
    from_[side] = panel.matrix + (kTransposed ? int64_t(first_k) * pitch_[side] + first_row
                                              : int64_t(first_row) * pitch_[side] + first_k);
  }

  Element const* from_[2];
  int pitch_[2];
  int rows_left_[2];
  int k_left_;
};

// Problem: tells the tiles of this block apart and where their operands are.
template <class Config, class Problem>
class Loader {
  using Cursor = PanelsCursor<Config>;

 public:
  __device__ Loader(typename Problem::Params const& params, uint8_t* stages)
      : params_(params), stages_(stages) {
    start_product();
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages - 1; ++stage) {
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group) copy(group);
      finish_step();
    }
  }

  // Begins a share of the copies of the next step, one for each group of its products.
  __device__ void copy(int group) {
    if (steps_left_ == 0) return;
    constexpr int kShare = Cursor::kPasses / Config::kGroups;
    uint8_t* const stage = stages_ + stage_ * Config::kStageBytes;
#pragma unroll
    for (int pass = group * kShare; pass < (group + 1) * kShare; ++pass) {
      cursor_.copy(stage, pass);
    }
  }

  // Closes the step, even one past the last: waiting counts steps.
  __device__ void finish_step() {
    commit_copies();
    stage_ = stage_ + 1 == Config::kStages ? 0 : stage_ + 1;
    if (steps_left_ == 0) return;
    cursor_.advance();
    if (--steps_left_ > 0) return;
    // The tile is asked for again rather than kept: registers are what the kernels lack.
    if (++product_ == Problem::products(params_, Problem::tile(params_, round_))) {
      product_ = 0;
      ++round_;
    }
    start_product();
  }

 private:
  __device__ void start_product() {
    auto const tile = Problem::tile(params_, round_);
    if (tile.steps == 0) return;
    auto const panels = Problem::panels(params_, tile, product_);
    cursor_.start(panels);
    steps_left_ = ceil_div(panels.k, Config::kTileK);
  }

  typename Problem::Params const& params_;
  uint8_t* stages_;
  int stage_ = 0;
  int round_ = 0;
  int product_ = 0;
  int steps_left_ = 0;  // of the product; none after the last tile
  Cursor cursor_;
};

}  // namespace jgg::fp64
