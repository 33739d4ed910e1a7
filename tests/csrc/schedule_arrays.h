// Arrays that the listed schedules take from Python and return to it.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "scheduler/segment_cursor.h"

namespace jgg {

namespace nb = nanobind;

using Sizes = nb::ndarray<int const, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<int const, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TileArray = nb::ndarray<nb::numpy, int, nb::ndim<2>>;

// Returns what kernels get for group_sizes [batches or 1, groups] and group_offset [batches or 1].
inline GroupSizes groups_of(Sizes const& group_sizes, Offsets const& group_offset, int batches,
                            int local_groups, int rows) {
  int const groups = static_cast<int>(group_sizes.shape(1));
  auto const stride = [batches](size_t count, int size) {
    if (count != 1 && count != static_cast<size_t>(batches)) {
      throw std::invalid_argument("group_sizes and group_offset have one row, or one per batch");
    }
    return count == 1 ? 0 : size;
  };
  return {group_sizes.data(),
          group_offset.data(),
          stride(group_sizes.shape(0), groups),
          stride(group_offset.shape(0), 1),
          batches,
          groups,
          local_groups,
          rows};
}

template <size_t kFields>
TileArray to_array(std::vector<std::array<int, kFields>> const& tiles) {
  auto* data = new int[tiles.size() * kFields];
  for (size_t i = 0; i < tiles.size(); ++i) {
    std::copy(tiles[i].begin(), tiles[i].end(), data + i * kFields);
  }
  nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<int*>(pointer); });
  return TileArray(data, {tiles.size(), kFields}, owner);
}

}  // namespace jgg
