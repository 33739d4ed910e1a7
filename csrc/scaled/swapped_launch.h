// Selects the compiled kernel for groups of few rows by the run-time arguments, and launches it.
#pragma once

#include "scaled/launch.h"
#include "scaled/swapped_noncontracting.h"
#include "scaled/tiles.h"
#include "sm90/config_of.h"
#include "sm90/launch.h"
#include "sm90/swapped_scaled_roles.h"

namespace jgg::sm90 {

template <ElementType kType>
cudaError_t scaled_noncontracting_swapped(TileConfig config, ScaledArguments const& arguments,
                                          cudaStream_t stream) {
  return with_constants(
      [&](auto tile, auto rhs_type) {
        using Tile = decltype(tile);
        using Config =
            SwappedScaledConfig<Typed<kType>, Typed<rhs_type>, Tile::kTileM, Tile::kTileN>;
        using Roles = SwappedScaledRoles<SwappedScaledNoncontracting<Config>>;
        return launch<Roles>(arguments, stream);
      },
      OneTileOf<ScaledSwappedTiles>{config}, RhsTypes<kType>{arguments.rhs_type});
}

}  // namespace jgg::sm90
