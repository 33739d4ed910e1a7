// Copies the operands of all steps of a block's tiles into the stages, up to kStages - 1 steps
// ahead. The loader does not stop at the end of a tile, so that the first steps of the next tile
// are copied while the previous tile is stored.
#pragma once

#include "fp64/instructions.h"
#include "fp64/kernel_config.h"
#include "fp64/shared_layout.h"
#include "fp64/tile_slots.h"

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

// How the threads of a block divide a panel. Each thread copies a unit of every kRowsPerPass-th row
// in memory. A row in memory is a row of the operand or, if transposed, a value of k.
template <class Config, bool kTransposed>
struct PanelUnits {
  using Layout = PanelLayout<Config, kTransposed>;
  static constexpr int kUnit = Config::kUnitBytes / sizeof(typename Config::Element);
  static constexpr int kUnitsInRow = (kTransposed ? Config::kTile : Config::kTileK) / kUnit;
  static constexpr int kRowsPerPass = Config::kThreads / kUnitsInRow;
  static constexpr int kPasses = (kTransposed ? Config::kTileK : Config::kTile) / kRowsPerPass;
  static_assert(kPasses % Config::kGroups == 0,
                "every group of products copies the same number of units");

  // The place of this thread's first unit in the panel.
  __device__ static int first_row() { return kTransposed ? along() : down(); }
  __device__ static int first_k() { return kTransposed ? down() : along(); }

  __device__ static int offset(int pass) {
    return Layout::further_down(Layout::offset(first_row(), first_k()), pass * kRowsPerPass);
  }

 private:
  __device__ static int down() { return threadIdx.x / kUnitsInRow; }
  __device__ static int along() { return threadIdx.x % kUnitsInRow * kUnit; }
};

// The part of an operand that one thread copies.
template <class Config, bool kTransposed>
class PanelCursor {
  using Element = typename Config::Element;
  using Units = PanelUnits<Config, kTransposed>;

 public:
  static constexpr int kPasses = Units::kPasses;

  __device__ void start(Panel<Element> const& panel, int k) {
    int const row = panel.first_row + Units::first_row();
    rows_left_ = panel.rows - row;
    pitch_ = kTransposed ? panel.rows : k;
    from_ = panel.matrix + (kTransposed ? int64_t(Units::first_k()) * pitch_ + row
                                        : int64_t(row) * pitch_ + Units::first_k());
  }

  // Moves to the next step.
  __device__ void advance() {
    from_ += kTransposed ? int64_t(Config::kTileK) * pitch_ : Config::kTileK;
  }

  // Copies the thread's unit of a pass. Elements outside of the operand become zero. `k_left`
  // values of k are left from the beginning of the step.
  __device__ void copy(uint8_t* panel, int pass, int k_left) const {
    int const down = pass * Units::kRowsPerPass;
    bool const has_k = k_left > Units::first_k() + (kTransposed ? down : 0);
    bool const has_row = rows_left_ > (kTransposed ? 0 : down);
    copy_async<Config::kUnitBytes>(panel + Units::offset(pass), from_ + int64_t(down) * pitch_,
                                   has_k && has_row);
  }

 private:
  Element const* from_;
  int pitch_;
  int rows_left_;
};

// `Problem` finds the tiles of this block and their operands.
template <class Config, class Problem>
class Loader {
  using LhsCursor = PanelCursor<Config, Config::kLhsTransposed>;
  using RhsCursor = PanelCursor<Config, Config::kRhsTransposed>;

 public:
  __device__ Loader(typename Problem::Params const& params, uint8_t* shared)
      : params_(params), stages_(shared), tiles_(shared) {
    start_product();
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages - 1; ++stage) {
      // Thread 0 puts the tile, and the other threads may read it only after this barrier. In later
      // steps, a barrier of the mainloop has this purpose.
      __syncthreads();
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group) copy(group);
      finish_step();
    }
  }

  // Begins share `group` of the copies of the next step. The mainloop calls it once for each of the
  // kGroups groups of a step's products.
  __device__ void copy(int group) {
    if (k_left_ <= 0) return;
    constexpr int kShare = LhsCursor::kPasses / Config::kGroups;
    uint8_t* const stage = stages_ + stage_ * Config::kStageBytes;
#pragma unroll
    for (int pass = group * kShare; pass < (group + 1) * kShare; ++pass) {
      lhs_.copy(stage, pass, k_left_);
      rhs_.copy(stage + Config::kPanelBytes, pass, k_left_);
    }
  }

  // Closes the group of copies of a step. Threads do this even when no steps are left, because
  // wait_for_copies() counts groups.
  __device__ void finish_step() {
    commit_copies();
    stage_ = stage_ + 1 == Config::kStages ? 0 : stage_ + 1;
    if (k_left_ <= 0) return;
    lhs_.advance();
    rhs_.advance();
    k_left_ -= Config::kTileK;
    if (k_left_ > 0) return;
    if (++product_ == Problem::products(params_, tiles_.at(round_))) {
      product_ = 0;
      ++round_;
    }
    start_product();
  }

 private:
  __device__ void start_product() {
    bool const is_first = product_ == 0;
    auto const tile = is_first ? Problem::tile(params_, round_) : tiles_.at(round_);
    if (is_first) tiles_.put(round_, tile);
    if (tile.steps == 0) return;
    auto const panels = Problem::panels(params_, tile, product_);
    lhs_.start(panels.lhs, panels.k);
    rhs_.start(panels.rhs, panels.k);
    k_left_ = panels.k;
  }

  typename Problem::Params const& params_;
  uint8_t* stages_;
  TileSlots<Config, Problem> tiles_;
  int stage_ = 0;
  int round_ = 0;
  int product_ = 0;
  int k_left_ = 0;  // of the product; not positive after the last tile
  LhsCursor lhs_;
  RhsCursor rhs_;
};

}  // namespace jgg::fp64
