// Selects the compiled FP8 kernel by the run-time arguments, and launches it.
#pragma once

#include <type_traits>

#include "scaled/scaled_ragged_dot.h"
#include "scaled/tiles.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/scaled_roles.h"

namespace jgg::sm90 {

// The types that rhs may have for a type of lhs. No kernel multiplies two operands in E5M2: Python
// splits lhs into two arrays in E4M3.
template <ElementType kLhsType>
using RhsTypes = std::conditional_t<kLhsType == ElementType::kE5m2, OneOf<ElementType::kE4m3>,
                                    OneOf<ElementType::kE4m3, ElementType::kE5m2>>;

// `kType` is the type of lhs.
template <class Tiles, template <class> class Problem, template <class> class Work,
          ElementType kType, ScaledForm kForm = ScaledForm{}>
cudaError_t launch_scaled(TileConfig config, ScaledArguments const& arguments,
                          cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto rhs_type) {
        using Tile = decltype(tile);
        using Config =
            ScaledConfig<Typed<kType>, Typed<rhs_type>, Tile::kTileN, Tile::kCluster, kForm>;
        return launch<ScaledRoles<Work<Problem<Config>>>>(arguments, stream);
      },
      OneTileOf<Tiles>{config}, RhsTypes<kType>{arguments.rhs_type});
}

}  // namespace jgg::sm90
