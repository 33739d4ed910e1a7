// The kind of a kernel, from the attributes of a call.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/buffers.h"
#include "types.h"

namespace jgg {

// What the attribute `kind` says.
constexpr std::array<std::pair<std::string_view, KernelKind>, 5> kKernelKinds{{
    {"cooperative", KernelKind::kCooperative},
    {"pingpong", KernelKind::kPingpong},
    {"stream_k", KernelKind::kStreamK},
    {"swapped", KernelKind::kSwapped},
    {"fine", KernelKind::kFine},
}};

inline ffi::ErrorOr<TileConfig> tile_config(int32_t tile_m, int32_t tile_n, int32_t cluster,
                                            std::string_view name) {
  for (auto const& [known, kind] : kKernelKinds) {
    if (known == name) return TileConfig{tile_m, tile_n, cluster, kind};
  }
  return ffi::Unexpected(invalid("there is no kind of kernel called " + std::string(name)));
}

// Versions of targets from before there was that attribute have the kind in the sizes of the tile,
// and one of these names for what no size says.
constexpr std::string_view kind_of_size(bool is_kind, std::string_view kind) {
  return is_kind ? kind : "cooperative";
}

}  // namespace jgg
