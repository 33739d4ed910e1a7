// The tiles that are compiled for each element type.
#pragma once

#include "dispatch.h"
#include "fp64/kernel_config.h"
#include "types.h"

namespace jgg::fp64 {

// A real tile of 128 x 128 is as large as the registers allow. The tile of 64 x 64 is for results
// that have too few large tiles. Complex numbers take twice the registers, and two blocks of 64 x
// 64 read as many bytes as one block of 128 x 128 would.
//
// Two warps that share a tensor core keep it busy with instructions of 4 values of k, which take
// 16.03 cycles for 16 cycles of products. Instructions of 8 values take 33.07 cycles for 32.
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
