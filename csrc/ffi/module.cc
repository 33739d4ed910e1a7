// The Python module jax_grouped_gemm._extension: hands the XLA FFI handlers to Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/handlers.h"
#include "fp8/scaled_tiles.h"
#include "rank_k/rank_k.h"
#include "rank_k/tile_table.h"
#include "scheduler/tile_list.h"
#include "scheduler/triangular.h"
#include "sm90/f32/workspace.h"
#include "sm90/ragged_dot.h"
#include "sm90/tile_table.h"
#include "xla/ffi/api/c_api.h"

namespace jgg {
namespace {

namespace nb = nanobind;

nb::capsule encapsulate(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// A target's name carries the version of its operands and attributes, so that an exported program
// never meets a handler that reads them differently.
nb::dict registrations() {
  nb::dict targets;
  targets["jax_grouped_gemm.ragged_noncontracting.v1"] = encapsulate(JggRaggedNoncontracting);
  targets["jax_grouped_gemm.ragged_contracting.v1"] = encapsulate(JggRaggedContracting);
  targets["jax_grouped_gemm.rank_k.v1"] = encapsulate(JggRankK);
  targets["jax_grouped_gemm.quantize_rows.v1"] = encapsulate(JggQuantizeRows);
  targets["jax_grouped_gemm.quantize_blocks.v1"] = encapsulate(JggQuantizeBlocks);
  targets["jax_grouped_gemm.quantize_ragged.v1"] = encapsulate(JggQuantizeRagged);
  targets["jax_grouped_gemm.scaled_ragged_noncontracting.v1"] =
      encapsulate(JggScaledRaggedNoncontracting);
  targets["jax_grouped_gemm.scaled_ragged_contracting.v1"] =
      encapsulate(JggScaledRaggedContracting);
  return targets;
}

// XLA refuses handlers with newer headers than its own, but so late that no backend initialises.
// Python compares versions first, where the error can still say what is wrong.
std::pair<int, int> ffi_api_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

void append_config(nb::list& configs, char const* op, int tile_m, int tile_n, int cluster,
                   char const* schedule = nullptr) {
  nb::dict config;
  config["op"] = op;
  config["tile_m"] = tile_m;
  config["tile_n"] = tile_n;
  config["cluster"] = cluster;
  if (schedule) config["schedule"] = schedule;
  configs.append(config);
}

template <class... Tiles>
void append_configs(nb::list& configs, char const* op, fp8::TileList<Tiles...>) {
  (append_config(configs, op, Tiles::kTileM, Tiles::kTileN, Tiles::kCluster,
                 fp8::name(Tiles::kSchedule)),
   ...);
}

nb::list kernel_configs() {
  nb::list configs;
  auto const append = [&](char const* op, std::vector<sm90::TileConfig> const& tiles) {
    for (sm90::TileConfig const& tile : tiles) {
      append_config(configs, op, tile.tile_m, tile.tile_n, tile.cluster);
    }
  };
  append("ragged_noncontracting", sm90::tile_configs());
  append("ragged_contracting", sm90::tile_configs());
  append("rank_k", sm90::rank_k_tile_configs());
  append_configs(configs, "scaled_ragged_noncontracting", fp8::NoncontractingTiles{});
  append_configs(configs, "scaled_ragged_contracting", fp8::ContractingTiles{});
  return configs;
}

using Sizes = nb::ndarray<int const, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<int const, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TileArray = nb::ndarray<nb::numpy, int, nb::ndim<2>>;

// group_sizes [batches or 1, groups] and group_offset [batches or 1] as the kernels see them.
GroupSizes groups_of(Sizes const& group_sizes, Offsets const& group_offset, int batches,
                     int local_groups, int rows) {
  int const groups = static_cast<int>(group_sizes.shape(1));
  auto const stride = [batches](size_t count, int size) {
    if (count != 1 && count != static_cast<size_t>(batches)) {
      throw std::invalid_argument("group_sizes and group_offset have one row, or one a batch");
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

TileArray to_array(std::vector<ListedTile> const& tiles) {
  constexpr size_t kFields = std::tuple_size_v<ListedTile>;
  auto* data = new int[tiles.size() * kFields];
  for (size_t i = 0; i < tiles.size(); ++i) {
    std::copy(tiles[i].begin(), tiles[i].end(), data + i * kFields);
  }
  nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<int*>(pointer); });
  return TileArray(data, {tiles.size(), kFields}, owner);
}

// The schedule that the kernels of one tile walk, run by a simulated warp.
template <template <class, int, int, int, int, int> class Schedule, class... Tiles>
TileArray tiles_of(sm90::TileTable<Tiles...>, GroupSizes const& groups, int rows, int columns,
                   int tile_m, int tile_n, int cluster, int align) {
  constexpr int kTileK = 64, kBoxAlign = 8;  // of 16-bit operands
  std::vector<ListedTile> tiles;
  auto const list = [&](auto tile, auto alignment) {
    using Tile = decltype(tile);
    if (tile_m != Tile::kTileM || tile_n != Tile::kTileN || cluster != Tile::kCluster ||
        align != alignment.value) {
      return false;
    }
    tiles = list_tiles(Schedule<SimulatedWarp, Tile::kTileM, Tile::kTileN, kTileK, Tile::kCluster,
                                alignment.value>(groups, rows, columns),
                       cluster);
    return true;
  };
  if (!(list(Tiles{}, std::integral_constant<int, 1>{}) || ...) &&
      !(list(Tiles{}, std::integral_constant<int, kBoxAlign>{}) || ...)) {
    throw std::invalid_argument("no kernel has this tile and alignment");
  }
  return to_array(tiles);
}

TileArray ragged_noncontracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                      int batches, int local_groups, int m, int k, int n,
                                      int tile_m, int tile_n, int cluster, int align) {
  return tiles_of<NoncontractingSchedule>(
      sm90::RaggedDotTiles{}, groups_of(group_sizes, group_offset, batches, local_groups, m), n, k,
      tile_m, tile_n, cluster, align);
}

TileArray ragged_contracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                   int batches, int local_groups, int m, int k, int n, int tile_m,
                                   int tile_n, int cluster, int align) {
  return tiles_of<ContractingSchedule>(
      sm90::RaggedDotTiles{}, groups_of(group_sizes, group_offset, batches, local_groups, m), k, n,
      tile_m, tile_n, cluster, align);
}

template <class... Tiles>
TileArray padded_tiles_of(fp8::TileList<Tiles...>, GroupSizes const& groups, int rows, int columns,
                          int tile_m, int tile_n, int cluster) {
  constexpr int kTileK = 128, kPad = 128;  // the tokens that share a scale
  std::vector<ListedTile> tiles;
  auto const list = [&](auto tile) {
    using Tile = decltype(tile);
    if (tile_m != Tile::kTileM || tile_n != Tile::kTileN || cluster != Tile::kCluster) return false;
    tiles = list_tiles(ContractingSchedule<SimulatedWarp, Tile::kTileM, Tile::kTileN, kTileK,
                                           Tile::kCluster, 1, kPad>(groups, rows, columns),
                       cluster);
    return true;
  };
  if (!(list(Tiles{}) || ...)) throw std::invalid_argument("no kernel has this tile");
  return to_array(tiles);
}

TileArray scaled_ragged_contracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                          int batches, int local_groups, int m, int k, int n,
                                          int tile_m, int tile_n, int cluster) {
  return padded_tiles_of(fp8::ContractingTiles{},
                         groups_of(group_sizes, group_offset, batches, local_groups, m), k, n,
                         tile_m, tile_n, cluster);
}

// What a handler demands of the workspace of float32 operands.
int64_t float32_workspace_bytes(bool contracting, bool lhs_batched, bool rhs_batched,
                                bool sizes_batched, bool offset_batched, int batches,
                                int local_groups, int m, int k, int n, int terms) {
  sm90::RaggedDotArguments arguments{};
  arguments.contracting = contracting;
  arguments.lhs_batched = lhs_batched;
  arguments.rhs_batched = rhs_batched;
  arguments.group_sizes_batched = sizes_batched;
  arguments.group_offset_batched = offset_batched;
  arguments.batches = batches;
  arguments.local_groups = local_groups;
  arguments.m = m;
  arguments.k = k;
  arguments.n = n;
  arguments.terms = terms;
  return sm90::f32::Workspace(arguments).bytes();
}

using Numbers = nb::ndarray<int const, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<std::pair<int, int>> triangle_entries(Numbers const& numbers) {
  std::vector<std::pair<int, int>> entries;
  for (size_t i = 0; i < numbers.size(); ++i) {
    TriangleEntry const entry = triangle_entry(numbers.data()[i]);
    entries.emplace_back(entry.row, entry.column);
  }
  return entries;
}

TileArray rank_k_tiles(Sizes const& stacks, bool upper, int clusters, int tile_m, int tile_n,
                       int cluster) {
  std::vector<ListedTile> tiles;
  Uplo const uplo = upper ? Uplo::kUpper : Uplo::kLower;
  sm90::with_tile(sm90::RankKTiles{}, {tile_m, tile_n, cluster}, [&](auto tile) {
    using Tile = decltype(tile);
    using Schedule = TriangularSchedule<Tile::kTileM, Tile::kTileN, Tile::kCluster>;
    std::vector<TriangularStack> table;
    int units = 0;
    for (size_t i = 0; i < stacks.shape(0); ++i) {
      int const* const stack = stacks.data() + i * stacks.shape(1);
      table.push_back({stack[0], stack[1], stack[2], units});
      units += Schedule::units(stack[0], stack[1], uplo);
    }
    tiles =
        list_tiles(Schedule(table.data(), static_cast<int>(table.size()), uplo, clusters), cluster);
    return cudaSuccess;
  });
  return to_array(tiles);
}

}  // namespace
}  // namespace jgg

NB_MODULE(_extension, module) {
  module.def("registrations", &jgg::registrations);
  module.def("ffi_api_version", &jgg::ffi_api_version);
  module.def("kernel_configs", &jgg::kernel_configs);
  using nanobind::literals::operator""_a;
  module.def("ragged_noncontracting_tiles", &jgg::ragged_noncontracting_tiles, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "align"_a);
  module.def("ragged_contracting_tiles", &jgg::ragged_contracting_tiles, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "align"_a);
  module.def("scaled_ragged_contracting_tiles", &jgg::scaled_ragged_contracting_tiles,
             "group_sizes"_a, "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a,
             "tile_m"_a, "tile_n"_a, "cluster"_a);
  module.def("float32_workspace_bytes", &jgg::float32_workspace_bytes, "contracting"_a,
             "lhs_batched"_a, "rhs_batched"_a, "sizes_batched"_a, "offset_batched"_a, "batches"_a,
             "local_groups"_a, "m"_a, "k"_a, "n"_a, "terms"_a);
  module.def("triangle_entries", &jgg::triangle_entries, "numbers"_a);
  module.def("rank_k_tiles", &jgg::rank_k_tiles, "stacks"_a, "upper"_a, "clusters"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a);
}
