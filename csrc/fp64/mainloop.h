// Multiplies the operands that the loader copies, one panel of lhs by one panel of rhs, step by
// step.
#pragma once

#include "fp64/instructions.h"
#include "fp64/kernel_config.h"
#include "fp64/shared_layout.h"

namespace jgg::fp64 {

// A warp's part of a tile. An instruction multiplies 16 rows by 8 columns. If numbers are complex,
// 8 of the rows are real parts and 8 are imaginary parts, so that one load fills the registers of
// both. In a real block, sums[0..1] are of row lane / 4 and sums[2..3] of row lane / 4 + 8. In a
// complex block, sums[0..1] and sums[2..3] are the real and the imaginary parts of row lane / 4.
// Columns are 2 (lane % 4) and 2 (lane % 4) + 1.
template <class Config>
struct Accumulators {
  static constexpr int kBlockRows = 16 / Config::kParts;
  static constexpr int kBlocksM = Config::kWarpRows / kBlockRows;
  static constexpr int kBlocksN = Config::kWarpColumns / 8;

  double sums[kBlocksM][kBlocksN][4];

  __device__ void clear() {
    for_each_block([](double (&block)[4], int, int) {
#pragma unroll
      for (double& x : block) x = 0.0;
    });
  }

  __device__ void scale(Complex128 factor) {
    static_assert(Config::kParts == 2);
    for_each_block([&](double (&block)[4], int, int) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Complex128 const scaled = times({block[i], block[2 + i]}, factor);
        block[i] = scaled.re;
        block[2 + i] = scaled.im;
      }
    });
  }

  // Calls function(row, column, value) for each value, with its place in the tile.
  template <class Function>
  __device__ void for_each_value(Function const& function) {
    using Sum = Value<typename Config::Element>;
    for_each_pair([&](int row, int column, Sum left, Sum right) {
      function(row, column, left);
      function(row, column + 1, right);
    });
  }

  // Calls function(row, column, left, right) with two values side by side, the first in an even
  // column.
  template <class Function>
  __device__ void for_each_pair(Function const& function) {
    // Without forgotten(), the compiler would compute the places before the mainloop and keep them
    // in registers during it.
    int const thread = forgotten(threadIdx.x);
    int const lane = thread % kWarpSize, warp = thread / kWarpSize;
    int const first_row = warp / Config::kWarpsN * Config::kWarpRows + lane / 4;
    int const first_column = warp % Config::kWarpsN * Config::kWarpColumns + lane % 4 * 2;
    for_each_block([&](double (&block)[4], int m, int n) {
      int const row = first_row + m * kBlockRows, column = first_column + n * 8;
      if constexpr (Config::kParts == 1) {
        function(row, column, block[0], block[1]);
        function(row + 8, column, block[2], block[3]);
      } else {
        function(row, column, Complex128{block[0], block[2]}, Complex128{block[1], block[3]});
      }
    });
  }

 private:
  template <class Function>
  __device__ void for_each_block(Function const& function) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) function(sums[m][n], m, n);
    }
  }
};

template <class Config>
class Mainloop {
  using Element = typename Config::Element;
  using LhsLayout = PanelLayout<Config, Config::kLhsTransposed>;
  using RhsLayout = PanelLayout<Config, Config::kRhsTransposed>;
  static constexpr int kBlocksM = Accumulators<Config>::kBlocksM;
  static constexpr int kBlocksN = Accumulators<Config>::kBlocksN;
  static constexpr int kQuads = Config::kQuads, kGroups = Config::kGroups;
  static_assert(kGroups % 2 == 0, "the groups of a step take turns with two sets of fragments");

  struct Fragments {
    double lhs[kBlocksM][kQuads][2];  // both halves of the rows of a block
    double rhs[Config::kParts][kBlocksN][kQuads];
  };

 public:
  __device__ explicit Mainloop(uint8_t const* stages)
      : stages_(stages),
        lhs_(LhsLayout::offset(warp() / Config::kWarpsN * Config::kWarpRows + lane() / 4,
                               lane() % 4)),
        rhs_(Config::kPanelBytes +
             RhsLayout::offset(warp() % Config::kWarpsN * Config::kWarpColumns + lane() / 4,
                               lane() % 4)) {
    wait_for_copies<Config::kStages - 2>();
    __syncthreads();
    load(fragments_[0], 0);
  }

  // Adds lhs rhs^T, or lhs rhs^H if `conjugates`, of the next `steps` steps to accumulators.
  //
  // Each set of fragments is loaded while the previous set is multiplied. Before the first set of a
  // step is loaded, the whole block waits at a barrier. Then the stage of this step is complete,
  // and no thread still reads the stage of the previous step, which the loader's next copies
  // overwrite.
  template <class Loader>
  __device__ void multiply(Accumulators<Config>& accumulators, int steps, bool conjugates,
                           Loader& loader) {
#pragma unroll 1
    for (; steps > 0; --steps) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group == kGroups - 1) {
          wait_for_copies<Config::kStages - 3>();
          __syncthreads();
          stage_ = stage_ + 1 == Config::kStages ? 0 : stage_ + 1;
        }
        load(fragments_[(group + 1) % 2], (group + 1) % kGroups);
        loader.copy(group);
        multiply(accumulators, fragments_[group % 2], conjugates);
      }
      loader.finish_step();
    }
  }

 private:
  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int warp() { return threadIdx.x / kWarpSize; }

  template <class Layout>
  __device__ Element read(int offset, int rows, int quads) const {
    // Add the stage to the offset first. Otherwise the compiler would compute in advance the sums
    // that depend only on the thread, and keep them in registers.
    int const in_stages = stage_ * Config::kStageBytes + offset;
    return *reinterpret_cast<Element const*>(stages_ + Layout::shifted(in_stages, rows, quads));
  }

  __device__ void load(Fragments& fragments, int group) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        Element const x = read<RhsLayout>(rhs_, n, group * kQuads + quad);
#pragma unroll
        for (int p = 0; p < Config::kParts; ++p) fragments.rhs[p][n][quad] = part(x, p);
      }
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        double (&to)[2] = fragments.lhs[m][quad];
        if constexpr (Config::kParts == 1) {
          to[0] = read<LhsLayout>(lhs_, 2 * m, group * kQuads + quad);
          to[1] = read<LhsLayout>(lhs_, 2 * m + 1, group * kQuads + quad);
        } else {
          Element const x = read<LhsLayout>(lhs_, m, group * kQuads + quad);
          to[0] = x.re;
          to[1] = x.im;
        }
      }
    }
  }

  __device__ static void multiply(Accumulators<Config>& accumulators, Fragments const& fragments,
                                  bool conjugates) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
      auto& lhs = fragments.lhs[m];
      multiply_row(accumulators.sums[m], lhs, fragments.rhs[0]);
      if constexpr (Config::kParts == 2) {
        // The imaginary part of the rhs is multiplied by i lhs, or by -i lhs if the rhs is to be
        // conjugated.
        double turned[kQuads][2];
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          turned[quad][0] = with_sign(lhs[quad][1], !conjugates);
          turned[quad][1] = with_sign(lhs[quad][0], conjugates);
        }
        multiply_row(accumulators.sums[m], turned, fragments.rhs[1]);
      }
    }
  }

  __device__ static void multiply_row(double (&sums)[kBlocksN][4], double const (&lhs)[kQuads][2],
                                      double const (&rhs)[kBlocksN][kQuads]) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) multiply_add(sums[n], lhs, rhs[n]);
  }

  uint8_t const* stages_;
  int stage_ = 0;
  int lhs_;  // offset of the first element that this thread reads in a stage
  int rhs_;
  Fragments fragments_[2];
};

}  // namespace jgg::fp64
