// The layout of operands in shared memory, which has no bank conflicts: no access of a warp needs
// one bank for two addresses.
#pragma once

#include <cstdint>

#include "fp64/kernel_config.h"

namespace jgg::fp64 {

// One operand's part of a stage: kTile rows by kTileK values of k, in the order of memory.
//
// A fragment is 8 rows by 4 values of k. Elements of 8 bytes are read by half warps, 4 rows at
// once, and those of 16 bytes by quarter warps, 2 rows at once: 128 bytes either way.
//
//   [rows, k]  A row is 128 bytes, so that the 4 values would be in the same banks in every row:
//              the groups of 4 are permuted by an exclusive or with the row.
//   [k, rows]  The rows of a fragment that are read at once are 32 bytes for each value of k.
//              These are permuted by an exclusive or with k.
template <class Config, bool kTransposed>
struct PanelLayout {
  static constexpr int kSize = sizeof(typename Config::Element);
  static constexpr int kQuadBytes = 4 * kSize;
  static constexpr int kQuadsInRow = Config::kStepBytes / kQuadBytes;
  static constexpr int kPitch = kTransposed ? Config::kTile * kSize : Config::kStepBytes;

  JGG_HOST_DEVICE static int offset(int row, int k) {
    if constexpr (kTransposed) {
      return k * kPitch + ((row * kSize) ^ (k % 4 * 32));
    } else {
      return row * kPitch + ((k * kSize) ^ (row % kQuadsInRow * kQuadBytes));
    }
  }

  // The offset of the element `down` rows of memory after the one at `offset`, whose row is below
  // `down` or, if rows are not permuted among themselves, any. `down` is a multiple of 8 in the
  // order [rows, k], and a power of two or a multiple of 4 in the other one.
  JGG_HOST_DEVICE static int further_down(int offset, int down) {
    return (kTransposed ? offset ^ (down % 4 * 32) : offset) + down * kPitch;
  }

  // The offset of the element 8 `rows` and 4 `quads` away from the one at `offset`, whose row is
  // below 8 and whose k below 4, but for multiples of 32 rows. If both are constants, this is
  // an exclusive or and an immediate.
  JGG_HOST_DEVICE static int shifted(int offset, int rows, int quads) {
    if constexpr (kTransposed) {
      int const bytes = rows * 8 * kSize;
      return (offset ^ (bytes % 128)) + (bytes - bytes % 128) + quads * 4 * kPitch;
    } else {
      return (offset ^ (quads * kQuadBytes)) + rows * 8 * kPitch;
    }
  }
};

// A finished tile [kTile, kTile], written as accumulators and read along rows and along columns.
template <class Config>
struct StagedLayout {
  JGG_HOST_DEVICE static int index(int row, int column) {
    return row * Config::kTile + (unsigned(column) ^ permutation(row));
  }

 private:
  // Reads along a column are of 16 (half a warp) or 8 (a quarter) rows, whose permutations have to
  // differ. Accumulators are 4 or 2 rows by every other of 8 columns, which leaves bit 0 and, if
  // there are 16 elements to all banks, bit 3 for the rows.
  JGG_HOST_DEVICE static unsigned permutation(unsigned row) {
    if constexpr (Config::kParts == 1) {
      return row % 2 + row / 2 % 2 * 8 + row / 4 % 4 * 2;
    } else {
      return row % 8;
    }
  }
};

struct Place {
  int row;
  int column;
};

// The place of a thread's i-th element of a staged tile. Elements of a warp are next to each other
// in memory.
template <class Config>
__device__ Place place_of(int i) {
  // Unsigned: powers of two are then shifts and masks.
  unsigned const index = unsigned(i) * Config::kThreads + threadIdx.x;
  return {static_cast<int>(index / Config::kTile), static_cast<int>(index % Config::kTile)};
}

}  // namespace jgg::fp64
