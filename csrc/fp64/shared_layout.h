// The layouts of operands and of finished tiles in shared memory, without bank conflicts.
#pragma once

#include "fp64/kernel_config.h"

namespace jgg::fp64 {

// One operand's part of a stage: kTile rows by kTileK values of k, in the order of memory.
//
// A fragment is 8 rows by 4 values of k. A half warp reads 4 rows of 8-byte elements at once, and a
// quarter warp reads 2 rows of 16-byte elements. Both read 128 bytes.
//
//   [rows, k]  A row is 128 bytes, so the 4 values would be in the same banks in every row.
//              Therefore the groups of 4 are permuted by an exclusive or with the row.
//   [k, rows]  The rows of a fragment that are read at once are 32 bytes for each value of k.
//              The groups of 32 bytes are permuted by an exclusive or with k.
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

  // Returns the offset of the element `down` rows of memory after the element at `offset`. In the
  // order [rows, k], `down` is a multiple of 8. In the order [k, rows], it is a multiple of 4, or
  // of a power of two that is larger than the k at `offset`.
  JGG_HOST_DEVICE static int further_down(int offset, int down) {
    return (kTransposed ? offset ^ (down % 4 * 32) : offset) + down * kPitch;
  }

  // Returns the offset of the element that is 8 * `rows` rows and 4 * `quads` values of k after the
  // element at `offset`. The element at `offset` has k below 4, and its row modulo 32 is below 8.
  // If `rows` and `quads` are constants, this is an exclusive or and a constant offset.
  JGG_HOST_DEVICE static int shifted(int offset, int rows, int quads) {
    if constexpr (kTransposed) {
      int const bytes = rows * 8 * kSize;
      return (offset ^ (bytes % 128)) + (bytes - bytes % 128) + quads * 4 * kPitch;
    } else {
      return (offset ^ (quads * kQuadBytes)) + rows * 8 * kPitch;
    }
  }
};

// The layout of a finished tile [kTile, kTile], which is written in the order of accumulators and
// read along rows and along columns.
template <class Config>
struct StagedLayout {
  JGG_HOST_DEVICE static int index(int row, int column) {
    return row * Config::kTile + (unsigned(column) ^ permutation(row));
  }

 private:
  // A read along a column takes 16 rows at once (half a warp) or 8 rows (a quarter), whose
  // permutations have to differ. A write of accumulators takes every other of 8 columns in 4 rows
  // at once, or in 2 rows of complex numbers. So the permutations of these rows differ in bit 0 of
  // the column and, for 4 rows, also in bit 3.
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

// Returns the place of a thread's i-th element of a staged tile. A warp's elements are contiguous
// in memory.
template <class Config>
__device__ Place place_of(int i) {
  // With unsigned numbers, divisions by powers of two are shifts and masks.
  unsigned const index = unsigned(i) * Config::kThreads + threadIdx.x;
  return {static_cast<int>(index / Config::kTile), static_cast<int>(index % Config::kTile)};
}

}  // namespace jgg::fp64
