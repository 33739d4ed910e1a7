// The tiles that are compiled for each element type.
#pragma once

#include "fp64/kernel_config.h"

namespace jgg::fp64 {

template <class... Shapes>
struct ShapeList {};

// A real tile of 128 is as wide as the registers allow; a quarter of it is for results that have
// too few. Complex numbers take twice the registers, and two blocks of 64 read as many bytes as one
// of 128 would.
template <class Element>
struct RankKShapes;
template <>
struct RankKShapes<double> {
  using List = ShapeList<TileShape<double, 128, 2, 4, 2, 1>, TileShape<double, 64, 2, 2, 2, 2>>;
};
template <>
struct RankKShapes<Complex64> {
  using List = ShapeList<TileShape<Complex64, 64, 2, 2, 1, 2>>;
};
template <>
struct RankKShapes<Complex128> {
  using List = ShapeList<TileShape<Complex128, 64, 2, 2, 1, 2>>;
};

}  // namespace jgg::fp64
