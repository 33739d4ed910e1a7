// Multiplies what the loader brings: a product of a block's two panels, step by step.
#pragma once

#include "fp64/instructions.h"
#include "fp64/kernel_config.h"
#include "fp64/shared_layout.h"

namespace jgg::fp64 {

// A warp's part of a tile. Element i of a block of 16 x 8 is in row 8 (i / 2) + lane / 4 and column
// 2 (lane % 4) + i % 2.
template <class Config>
struct Accumulators {
  static constexpr int kBlocksM = Config::kWarpRows / 16, kBlocksN = Config::kWarpColumns / 8;

  double part[Config::kParts][kBlocksM][kBlocksN][4];

  __device__ void clear() {
    for_each([](auto&... parts) { ((parts = 0.0), ...); });
  }

  __device__ void scale(double factor) {
    for_each([&](double& x) { x *= factor; });
  }
  __device__ void scale(Complex128 factor) {
    for_each([&](double& re, double& im) {
      Complex128 const scaled = times({re, im}, factor);
      re = scaled.re;
      im = scaled.im;
    });
  }

  // Calls function(place in the tile..., value).
  template <class Function>
  __device__ void for_each_value(Function const& function) const {
    int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    int const row = warp / Config::kWarpsN * Config::kWarpRows + lane / 4;
    int const column = warp % Config::kWarpsN * Config::kWarpColumns + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const down = m * 16 + i / 2 * 8, right = n * 8 + i % 2;
          if constexpr (Config::kParts == 1) {
            function(row + down, column + right, part[0][m][n][i]);
          } else {
            function(row + down, column + right, Complex128{part[0][m][n][i], part[1][m][n][i]});
          }
        }
      }
    }
  }

 private:
  template <class Function>
  __device__ void for_each(Function const& function) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (Config::kParts == 1) {
            function(part[0][m][n][i]);
          } else {
            function(part[0][m][n][i], part[1][m][n][i]);
          }
        }
      }
    }
  }
};

template <class Config>
class Mainloop {
  using Element = typename Config::Element;
  using Layout = PanelLayout<Config>;
  static constexpr int kBlocksM = Accumulators<Config>::kBlocksM;
  static constexpr int kBlocksN = Accumulators<Config>::kBlocksN;
  static constexpr int kQuads = Config::kQuads, kGroups = Config::kGroups;
  static_assert(kGroups % 2 == 0, "the groups of a step take turns with two sets of fragments");

  struct Fragments {
    double lhs[Config::kParts][kBlocksM][kQuads][2];
    double rhs[Config::kParts][kBlocksN][kQuads];
  };

 public:
  __device__ explicit Mainloop(uint8_t const* stages)
      : stages_(stages),
        lhs_(Layout::offset(warp() / Config::kWarpsN * Config::kWarpRows + lane() / 4, lane() % 4)),
        rhs_(Config::kPanelBytes +
             Layout::offset(warp() % Config::kWarpsN * Config::kWarpColumns + lane() / 4,
                            lane() % 4)) {
    wait_for_copies<Config::kStages - 2>();
    __syncthreads();
    load(fragments_[0], 0);
  }

  // accumulators += lhs rhs^T, or ^H if `conjugates`, over the next `steps` steps.
  //
  // A set of fragments is loaded while the one before is multiplied, the first set of a step while
  // the last one of the step before is. At that point the whole block waits: then the next stage is
  // complete and nobody reads the last one any more, which the loader's next copies overwrite.
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

  __device__ Element read(int offset, int rows, int quads) const {
    // The stage first: what only depends on the thread would be kept in registers.
    int const in_stages = stage_ * Config::kStageBytes + offset;
    return *reinterpret_cast<Element const*>(stages_ + Layout::shifted(in_stages, rows, quads));
  }

  __device__ void load(Fragments& fragments, int group) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        Element const x = read(rhs_, n, group * kQuads + quad);
#pragma unroll
        for (int p = 0; p < Config::kParts; ++p) fragments.rhs[p][n][quad] = part(x, p);
      }
#pragma unroll
      for (int m = 0; m < 2 * kBlocksM; ++m) {
        Element const x = read(lhs_, m, group * kQuads + quad);
#pragma unroll
        for (int p = 0; p < Config::kParts; ++p) fragments.lhs[p][m / 2][quad][m % 2] = part(x, p);
      }
    }
  }

  __device__ static void multiply(Accumulators<Config>& accumulators, Fragments const& fragments,
                                  bool conjugates) {
    auto& sums = accumulators.part;
    if constexpr (Config::kParts == 1) {
      multiply_part(sums[0], fragments.lhs[0], fragments.rhs[0]);
    } else {
      double im[kBlocksN][kQuads];
      // The two products of a part are far from each other: the second adds to the first.
      copy_with_sign(im, fragments.rhs[1], conjugates);
      multiply_part(sums[0], fragments.lhs[0], fragments.rhs[0]);
      multiply_part(sums[1], fragments.lhs[0], im);
      copy_with_sign(im, fragments.rhs[1], !conjugates);
      multiply_part(sums[0], fragments.lhs[1], im);
      multiply_part(sums[1], fragments.lhs[1], fragments.rhs[0]);
    }
  }

  __device__ static void copy_with_sign(double (&to)[kBlocksN][kQuads],
                                        double const (&from)[kBlocksN][kQuads], bool negative) {
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) to[n][quad] = with_sign(from[n][quad], negative);
    }
  }

  __device__ static void multiply_part(double (&sums)[kBlocksM][kBlocksN][4],
                                       double const (&lhs)[kBlocksM][kQuads][2],
                                       double const (&rhs)[kBlocksN][kQuads]) {
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) multiply_add(sums[m][n], lhs[m], rhs[n]);
    }
  }

  uint8_t const* stages_;
  int stage_ = 0;
  int lhs_;  // of the first element that this thread reads of a stage
  int rhs_;
  Fragments fragments_[2];
};

}  // namespace jgg::fp64
