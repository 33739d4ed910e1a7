// Code that the swap-AB kernels for groups of few rows share. A tile is multiplied with only as
// many rows as it has, and a role takes one tile after the other.
#pragma once

#include <type_traits>

#include "sm90/work.h"

namespace jgg::sm90 {

constexpr int kColumnsPerConsumer = 64;  // M of one WGMMA, whose M side has the columns

// Returns the number of rows of a tile: those of its group that are left, at most kTileM.
template <class Config>
__device__ int rows_of(WorkTile const& work) {
  int const left = work.extent - work.m;
  return left < Config::kTileM ? left : Config::kTileM;
}

// Calls `function` with the first of the numbers kRows, kMore... that is at least `rows`, as a
// constant.
template <int kRows, int... kMore, class Function>
__device__ void with_least(int rows, Function function) {
  if constexpr (sizeof...(kMore) > 0) {
    if (rows > kRows) return with_least<kMore...>(rows, function);
  }
  function(std::integral_constant<int, kRows>{});
}

// Calls `function` with the least of 16, 32, ... kMost that is at least `rows`, as a constant.
template <int kMost, int kRows = 16, class Function>
__device__ void with_rows(int rows, Function function) {
  if constexpr (kRows < kMost) {
    if (rows > kRows) return with_rows<kMost, kRows * 2>(rows, function);
  }
  function(std::integral_constant<int, kRows>{});
}

}  // namespace jgg::sm90
