// The tiles that are compiled for each element type.
#pragma once

#include "dispatch.h"
#include "fp64/kernel_config.h"
#include "types.h"

namespace jgg::fp64 {

// A real tile of 128 is as wide as the registers allow; a quarter of it is for results that have
// too few. Complex numbers take twice the registers, and two blocks of 64 read as many bytes as one
// of 128 would.
//
// Two warps that share a tensor core keep it busy with instructions of 4 values of k (16.03 cycles
// each, 16 of them products), and less so with those of 8 (33.07 and 32).
template <ElementType>
struct TilesOf;
template <>
struct TilesOf<ElementType::kF64> {
  using Element = double;
  using Table = TileTable<TileShape<double, 128, 2, 4, 1, 1>, TileShape<double, 64, 2, 2, 2, 2>>;
};
template <>
struct TilesOf<ElementType::kC64> {
  using Element = Complex64;
  using Table = TileTable<TileShape<Complex64, 64, 2, 2, 1, 2>>;
};
template <>
struct TilesOf<ElementType::kC128> {
  using Element = Complex128;
  using Table = TileTable<TileShape<Complex128, 64, 2, 2, 1, 2>>;
};

}  // namespace jgg::fp64
