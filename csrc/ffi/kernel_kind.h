// The names that kinds of kernels have in attributes.
#pragma once

#include <array>
#include <string_view>
#include <utility>

#include "types.h"

namespace jgg {

constexpr std::array<std::pair<std::string_view, KernelKind>, 5> kKernelKinds{{
    {"cooperative", KernelKind::kCooperative},
    {"pingpong", KernelKind::kPingpong},
    {"stream_k", KernelKind::kStreamK},
    {"swapped", KernelKind::kSwapped},
    {"fine", KernelKind::kFine},
}};

// False if there is none of that name.
constexpr bool kernel_kind(std::string_view name, KernelKind& kind) {
  for (auto const& [known, value] : kKernelKinds) {
    if (known != name) continue;
    kind = value;
    return true;
  }
  return false;
}

}  // namespace jgg
