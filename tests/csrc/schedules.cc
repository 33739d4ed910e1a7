// Lists the schedules that the kernels walk, for tests and inspection. Simulated warps run them on
// the host.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "grouped/tiles.h"
#include "module.h"
#include "multiprocessors.h"
#include "ragged/tiles.h"
#include "rank_k/tiles.h"
#include "scaled/tiles.h"
#include "schedule_arrays.h"
#include "scheduler/problem_list.h"
#include "scheduler/product_runs.h"
#include "scheduler/ragged_schedule.h"
#include "scheduler/triangular.h"
#include "scheduler/triangular_fine.h"
#include "scheduler/triangular_runs.h"
#include "tile_list.h"

namespace jgg {
namespace {

// SimulatedTurns have room for as many clusters as turns on the device, which a launch never
// exceeds.
void check_clusters(int clusters, int cluster) {
  if (clusters > kMostMultiprocessors / cluster) {
    throw std::invalid_argument("no device has so many clusters");
  }
}
template <class Tile>
using SimulatedTurns = EarliestFree<SimulatedWarp, kMostMultiprocessors / Tile::kCluster>;

// Calls `list(tile)` for each compiled tile until a call returns true.
template <class List, class... Tiles>
void list_first(List list, Tiles... tiles) {
  if (!(list(tiles) || ...)) throw std::invalid_argument("no kernel has this tile");
}

template <class List, class... Tiles>
void list_first(List list, TileTable<Tiles...>) {
  list_first(list, Tiles{}...);
}

template <class List, class... Tiles, class... More>
void list_first(List list, TileTable<Tiles...>, TileTable<More...>) {
  list_first(list, Tiles{}..., More{}...);
}

template <class Tile>
bool is_tile(int tile_m, int tile_n, int cluster) {
  return tile_m == Tile::kTileM && tile_n == Tile::kTileN && cluster == Tile::kCluster;
}

// Calls `list` with the alignment as a constant: kBoxAlign for operands whose rows are contiguous,
// or else 1.
template <class List>
std::vector<ListedTile> with_alignment(int align, List list) {
  constexpr int kBoxAlign = 8;  // of 16-bit operands
  if (align == 1) return list(std::integral_constant<int, 1>{});
  if (align == kBoxAlign) return list(std::integral_constant<int, kBoxAlign>{});
  throw std::invalid_argument("no kernel has this alignment");
}

constexpr int kTileK = 64;  // of 16-bit operands

// Lists the schedule of all kernels with one tile. The schedule does not depend on how warpgroups
// divide the tile.
TileArray ragged_noncontracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                      int batches, int local_groups, int m, int k, int n,
                                      int tile_m, int tile_n, int cluster, int align, int clusters,
                                      bool zeroes_unowned, bool shares_lhs) {
  GroupSizes groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  groups.zeroes_unowned = zeroes_unowned;
  std::vector<ListedTile> tiles;
  list_first(
      [&](auto tile) {
        using Tile = decltype(tile);
        if (!is_tile<Tile>(tile_m, tile_n, cluster)) return false;
        tiles = with_alignment(align, [&](auto alignment) {
          auto const list = [&](auto shares_lhs) {
            using Schedule =
                NoncontractingSchedule<SimulatedWarp, Tile::kTileM, Tile::kTileN, kTileK,
                                       Tile::kCluster, alignment.value, shares_lhs.value>;
            return list_tiles<RoundRobin>(Schedule(groups, n, k), cluster, clusters);
          };
          return shares_lhs ? list(std::true_type{}) : list(std::false_type{});
        });
        return true;
      },
      sm90::NoncontractingTiles{});
  return to_array(tiles);
}

template <class Tile, int kTileK, int kAlign, int kPad, class TurnsOfFewSteps = RoundRobin>
std::vector<ListedTile> contracting_tiles(GroupSizes const& groups, int k, int n, int few_rows,
                                          int clusters, int times_mean = 2) {
  using Schedule = ContractingSchedule<SimulatedWarp, Tile::kTileM, Tile::kTileN, kTileK,
                                       Tile::kCluster, kAlign, kPad, TurnsOfFewSteps>;
  check_clusters(clusters, Tile::kCluster);
  typename Schedule::Grid const grid(groups, k, n, few_rows, times_mean);
  return list_tiles<SimulatedTurns<Tile>>(Schedule(groups, grid), Tile::kCluster, clusters);
}

TileArray ragged_contracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                   int batches, int local_groups, int m, int k, int n, int tile_m,
                                   int tile_n, int cluster, int align, int clusters, bool gathers) {
  GroupSizes const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  std::vector<ListedTile> tiles;
  list_first(
      [&](auto tile) {
        using Tile = decltype(tile);
        if (!is_tile<Tile>(tile_m, tile_n, cluster)) return false;
        tiles = with_alignment(align, [&](auto alignment) {
          auto const list = [&]<class Turns>(std::type_identity<Turns>) {
            return contracting_tiles<Tile, kTileK, alignment.value, 1, Turns>(
                groups, k, n, kFewRows, clusters, hot_times_mean(gathers));
          };
          return gathers ? list(std::type_identity<EvenRanges>{})
                         : list(std::type_identity<RoundRobin>{});
        });
        return true;
      },
      sm90::ContractingTiles{});
  return to_array(tiles);
}

TileArray scaled_ragged_noncontracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                             int batches, int local_groups, int m, int k, int n,
                                             int tile_m, int tile_n, int cluster, int clusters) {
  GroupSizes const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  std::vector<ListedTile> tiles;
  list_first(
      [&](auto tile) {
        using Tile = decltype(tile);
        if (!is_tile<Tile>(tile_m, tile_n, cluster)) return false;
        using Schedule = NoncontractingSchedule<SimulatedWarp, Tile::kTileM, Tile::kTileN,
                                                kScaleBlock, Tile::kCluster>;
        tiles = list_tiles<RoundRobin>(Schedule(groups, n, k), cluster, clusters);
        return true;
      },
      sm90::ScaledNoncontractingTiles{}, sm90::ScaledSwappedTiles{});
  return to_array(tiles);
}

TileArray scaled_ragged_contracting_tiles(Sizes const& group_sizes, Offsets const& group_offset,
                                          int batches, int local_groups, int m, int k, int n,
                                          int tile_m, int tile_n, int cluster, int clusters) {
  GroupSizes const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  std::vector<ListedTile> tiles;
  list_first(
      [&](auto tile) {
        using Tile = decltype(tile);
        if (!is_tile<Tile>(tile_m, tile_n, cluster)) return false;
        tiles = contracting_tiles<Tile, kScaleBlock, 1, kScaleBlock>(groups, k, n, kScaleBlock / 2,
                                                                     clusters);
        return true;
      },
      sm90::ScaledContractingTiles{});
  return to_array(tiles);
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

TileConfig rank_k_tile(int tile_m, int tile_n, int cluster) {
  return {tile_m, tile_n, cluster, tile_m == tile_n ? KernelKind::kFine : KernelKind::kCooperative};
}

// A stack is [matrices, n, steps of a tile, steps of a narrow tile, whether narrow tiles come in
// halves].
TileArray rank_k_tiles(Sizes const& stacks, bool upper, int clusters, int tile_m, int tile_n,
                       int cluster) {
  std::vector<ListedTile> tiles;
  Uplo const uplo = upper ? Uplo::kUpper : Uplo::kLower;
  with_tile(sm90::RankKTiles{}, rank_k_tile(tile_m, tile_n, cluster), [&](auto tile) {
    using Tile = decltype(tile);
    using Schedule = TriangularScheduleOf<Tile::kTileM, Tile::kTileN, Tile::kCluster>;
    using Turns =
        typename Schedule::template Turns<SimulatedWarp, kMostMultiprocessors / Tile::kCluster>;
    std::vector<TriangularStack> table;
    int units = 0;
    for (size_t i = 0; i < stacks.shape(0); ++i) {
      int const* const stack = stacks.data() + i * stacks.shape(1);
      table.push_back({stack[0], stack[1], stack[2], stack[3], units, stack[4] != 0});
      units += Schedule::units(table.back(), uplo);
    }
    Schedule const schedule(table.data(), static_cast<int>(table.size()), uplo);
    tiles = list_tiles<Turns>(schedule, cluster, clusters);
    return cudaSuccess;
  });
  return to_array(tiles);
}

// `steps` is the number of steps of a tile that is not narrow.
bool rank_k_gains_by_halves(int matrices, int n, int steps, bool upper, int clusters, int tile_m,
                            int tile_n, int cluster) {
  bool gains = false;
  Uplo const uplo = upper ? Uplo::kUpper : Uplo::kLower;
  with_tile(sm90::RankKTiles{}, rank_k_tile(tile_m, tile_n, cluster), [&](auto tile) {
    using Tile = decltype(tile);
    using Schedule = TriangularScheduleOf<Tile::kTileM, Tile::kTileN, Tile::kCluster>;
    gains = Schedule::gains_by_halves({matrices, n, steps, 0, 0}, uplo, clusters);
    return cudaSuccess;
  });
  return gains;
}

using Schedule = nb::ndarray<int const, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// If `schedule` is empty, the clusters find their units themselves.
TileArray grouped_gemm_tiles(Sizes const& problems, Schedule const& schedule, int clusters,
                             int tile_m, int tile_n, int cluster) {
  std::vector<ListedProblem> listed;
  int matrices = 0;
  for (size_t i = 0; i < problems.shape(0); ++i) {
    int const* const problem = problems.data() + i * problems.shape(1);
    listed.push_back({problem[1], problem[2], problem[3], matrices});
    matrices += problem[0];
  }
  ProblemList const list{listed.data(), static_cast<int>(listed.size()), matrices};
  int const scheduled = static_cast<int>(schedule.shape(0) * schedule.shape(1));
  auto const* const units = reinterpret_cast<ScheduledUnit const*>(schedule.data());
  std::vector<ListedTile> tiles;
  with_tile(sm90::GroupedGemmTiles{}, {tile_m, tile_n, cluster}, [&](auto tile) {
    using Tile = decltype(tile);
    // Every cluster walks the schedule for itself, in ascending order of units.
    for (int first = 0; first < clusters; ++first) {
      ListSchedule<SimulatedWarp, Tile::kTileM, Tile::kTileN, Tile::kCluster> walk[] = {
          {list, scheduled ? units : nullptr, scheduled, clusters},
          {list, scheduled ? units : nullptr, scheduled, clusters}};
      WorkTile work;
      for (int unit = first;; unit += clusters) {
        bool more = true;
        for (int rank = 0; rank < cluster; ++rank) {
          more = walk[rank].tile(unit, rank, work);
          if (more) tiles.push_back(listed_tile(unit, rank, first, work));
        }
        if (!more) break;
      }
    }
    return cudaSuccess;
  });
  return to_array(tiles);
}

// Takes stacks [matrices, n, steps, steps on the diagonal]. Returns for each tile, in the order in
// which `blocks` blocks take tiles: round, block, stack, matrix, m, n, steps, and whether the tile
// is on the diagonal.
TileArray square_triangle_tiles(Sizes const& stacks, bool upper, int blocks, int tile) {
  auto const list = [&](auto size) {
    using Schedule = TriangularRunSchedule<size.value>;
    std::vector<TriangularWork> work;
    for (size_t i = 0; i < stacks.shape(0); ++i) {
      int const* const stack = stacks.data() + i * stacks.shape(1);
      work.push_back({stack[0], stack[1], stack[2], stack[3]});
    }
    int units;
    std::vector<TriangularRun> const runs = Schedule::runs(work, units);
    Schedule const schedule(runs.data(), static_cast<int>(runs.size()), units,
                            upper ? Uplo::kUpper : Uplo::kLower);
    std::vector<std::array<int, 8>> tiles;
    for (int round = 0; round * blocks < units; ++round) {
      for (int block = 0; block < blocks; ++block) {
        TriangularTile const found = schedule.tile(round, block, blocks);
        if (found.steps == 0) continue;
        tiles.push_back({round, block, found.stack, found.matrix, found.m, found.n, found.steps,
                         static_cast<int>(found.diagonal)});
      }
    }
    return to_array(tiles);
  };
  if (tile == 128) return list(std::integral_constant<int, 128>{});
  if (tile == 64) return list(std::integral_constant<int, 64>{});
  throw std::invalid_argument("no kernel has this tile");
}

// Takes products [m, n, steps]. Returns for each tile, in the order in which `blocks` blocks take
// tiles: round, block, product, m, n and steps.
TileArray square_product_tiles(Sizes const& products, int blocks, int tile) {
  auto const list = [&](auto size) {
    using Schedule = ProductRunSchedule<size.value>;
    std::vector<ProductRun> runs;
    for (size_t i = 0; i < products.shape(0); ++i) {
      int const* const product = products.data() + i * products.shape(1);
      runs.push_back({static_cast<int>(i), product[0], product[1], 0, product[2]});
    }
    int const units = Schedule::arrange(runs);
    Schedule const schedule(runs.data(), static_cast<int>(runs.size()), units);
    std::vector<std::array<int, 6>> tiles;
    for (int round = 0; round * blocks < units; ++round) {
      for (int block = 0; block < blocks; ++block) {
        ProductTile const found = schedule.tile(round, block, blocks);
        if (found.steps == 0) continue;
        tiles.push_back({round, block, found.problem, found.m, found.n, found.steps});
      }
    }
    return to_array(tiles);
  };
  if (tile == 128) return list(std::integral_constant<int, 128>{});
  if (tile == 64) return list(std::integral_constant<int, 64>{});
  throw std::invalid_argument("no kernel has this tile");
}

}  // namespace

void define_schedules(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("ragged_noncontracting_tiles", &ragged_noncontracting_tiles, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "align"_a, "clusters"_a = 1, "zeroes_unowned"_a = true,
             "shares_lhs"_a = false);
  module.def("ragged_contracting_tiles", &ragged_contracting_tiles, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "align"_a, "clusters"_a = 1, "gathers"_a = false);
  module.def("scaled_ragged_noncontracting_tiles", &scaled_ragged_noncontracting_tiles,
             "group_sizes"_a, "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a,
             "tile_m"_a, "tile_n"_a, "cluster"_a, "clusters"_a = 1);
  module.def("scaled_ragged_contracting_tiles", &scaled_ragged_contracting_tiles, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "clusters"_a = 1);
  module.def("triangle_entries", &triangle_entries, "numbers"_a);
  module.def("grouped_gemm_tiles", &grouped_gemm_tiles, "problems"_a, "schedule"_a, "clusters"_a,
             "tile_m"_a, "tile_n"_a, "cluster"_a);
  module.def("rank_k_gains_by_halves", &rank_k_gains_by_halves, "matrices"_a, "n"_a, "steps"_a,
             "upper"_a, "clusters"_a, "tile_m"_a, "tile_n"_a, "cluster"_a);
  module.def("rank_k_tiles", &rank_k_tiles, "stacks"_a, "upper"_a, "clusters"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a);
  module.def("square_triangle_tiles", &square_triangle_tiles, "stacks"_a, "upper"_a, "blocks"_a,
             "tile"_a);
  module.def("square_product_tiles", &square_product_tiles, "products"_a, "blocks"_a, "tile"_a);
}

}  // namespace jgg
