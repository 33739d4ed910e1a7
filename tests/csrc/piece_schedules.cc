// Lists the schedules that find a cluster's tiles or pieces of tiles one by one, for tests and
// inspection. Simulated warps run them on the host.
#include <array>
#include <optional>
#include <stdexcept>
#include <vector>

#include "module.h"
#include "packed/packed.h"
#include "ragged/tiles.h"
#include "scaled/tiles.h"
#include "schedule_arrays.h"
#include "scheduler/assignment.h"
#include "scheduler/chains.h"
#include "scheduler/contracting_pieces.h"
#include "scheduler/even_assignment.h"
#include "scheduler/skew.h"
#include "scheduler/stream_k_schedule.h"
#include "scheduler/tails_apart_schedule.h"

namespace jgg {
namespace {

constexpr int kTileK = 64;  // of 16-bit operands

using ListedPiece = std::array<int, 14>;

// Lists the tiles of one cluster after the other. An entry has the cluster, the rank, and the
// members of WorkTile. `schedule_of(cluster)` is the schedule of one of the clusters.
template <class ScheduleOf>
TileArray list_pieces(ScheduleOf const& schedule_of, int ranks, int clusters) {
  std::vector<ListedPiece> pieces;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    std::vector schedules(ranks, schedule_of(cluster));
    for (WorkTile work; schedules[0].next(0, work);) {
      for (int rank = 0;;) {
        pieces.push_back({cluster, rank, work.batch, work.group, work.begin, work.extent, work.head,
                          work.m, work.n, work.k_tiles, static_cast<int>(work.share),
                          work.first_step, work.partials, work.slot});
        if (++rank == ranks) break;
        if (!schedules[rank].next(rank, work)) throw std::logic_error("ranks disagree");
      }
    }
  }
  return to_array(pieces);
}

// Lists the pieces of a noncontracting product whose last wave is cut, with steps of `kTileK`
// elements.
template <int kTileK, class Tile>
TileArray stream_k_pieces(Tile, GroupSizes const& groups, int n, int k, int clusters) {
  using Schedule =
      StreamKSchedule<SimulatedWarp, Tile::kTileM, Tile::kTileN, kTileK, Tile::kCluster>;
  return list_pieces([&](int own) { return Schedule(groups, n, k, own, clusters); }, Tile::kCluster,
                     clusters);
}

TileArray ragged_noncontracting_pieces(Sizes const& group_sizes, Offsets const& group_offset,
                                       int batches, int local_groups, int m, int k, int n,
                                       int tile_m, int tile_n, int cluster, int clusters) {
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  std::optional<TileArray> pieces;
  with_tile(sm90::StreamKTiles{}, {tile_m, tile_n, cluster, KernelKind::kStreamK}, [&](auto tile) {
    pieces = stream_k_pieces<kTileK>(tile, groups, n, k, clusters);
    return cudaSuccess;
  });
  if (!pieces) throw std::invalid_argument("no kernel has this tile");
  return *pieces;
}

TileArray scaled_ragged_noncontracting_pieces(Sizes const& group_sizes, Offsets const& group_offset,
                                              int batches, int local_groups, int m, int k, int n,
                                              int tile_m, int tile_n, int cluster, int clusters) {
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  std::optional<TileArray> pieces;
  with_tile(sm90::ScaledStreamKTiles{}, {tile_m, tile_n, cluster, KernelKind::kStreamK},
            [&](auto tile) {
              pieces = stream_k_pieces<kScaleBlock>(tile, groups, n, k, clusters);
              return cudaSuccess;
            });
  if (!pieces) throw std::invalid_argument("no kernel has this tile");
  return *pieces;
}

// Lists the tiles of a product of packed matrices whose tiles have more than kFewRows rows.
TileArray tails_apart_tiles(Sizes const& group_sizes, Offsets const& group_offset, int batches,
                            int local_groups, int m, int k, int n, int tile_m, int tile_n,
                            int cluster, int clusters, bool zeroes_unowned) {
  GroupSizes groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  groups.zeroes_unowned = zeroes_unowned;
  auto const list = [&]<int kTileM, int kTileN, int kCluster>() {
    using Schedule = TailsApartSchedule<SimulatedWarp, kTileM, kTileN, kTileK, kCluster>;
    return list_pieces([&](int own) { return Schedule(groups, n, k, own, clusters); }, kCluster,
                       clusters);
  };
  std::array const tile{tile_m, tile_n, cluster};
  using packed::kManyRows, packed::kTallRows;
  if (tile == std::array{kManyRows, 128, 1}) return list.operator()<kManyRows, 128, 1>();
  if (tile == std::array{kManyRows, 256, 1}) return list.operator()<kManyRows, 256, 1>();
  if (tile == std::array{kTallRows, 64, 2}) return list.operator()<kTallRows, 64, 2>();
  throw std::invalid_argument("no kernel has this tile");
}

// Lists the pieces of chains that are cut as if their length were `length`.
TileArray ragged_contracting_pieces(Sizes const& group_sizes, Offsets const& group_offset,
                                    int batches, int local_groups, int m, int k, int n, int tile_m,
                                    int tile_n, int cluster, int clusters, int length,
                                    int longest) {
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  std::optional<TileArray> pieces;
  with_tile(sm90::CutTiles{}, {tile_m, tile_n, cluster}, [&](auto tile) {
    using Tile = decltype(tile);
    using Schedule =
        ContractingPieces<SimulatedWarp, Tile::kTileM, Tile::kTileN, kTileK, Tile::kCluster>;
    typename Schedule::Grid const grid(groups, k, n);
    ChainCuts const cuts(grid.units, length, longest, clusters);
    pieces = list_pieces([&](int own) { return Schedule(groups, grid, cuts, own, clusters); },
                         Tile::kCluster, clusters);
    return cudaSuccess;
  });
  if (!pieces) throw std::invalid_argument("no kernel has this tile");
  return *pieces;
}

TileArray chain_ranges(int chains, int length, int longest, int clusters) {
  ChainCuts const cuts(chains, length, longest, clusters);
  std::vector<std::array<int, 5>> ranges;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    ChainAssignment own(cuts, cluster, clusters);
    for (ChainRange range; own.next(cuts, range);) {
      ranges.push_back({cluster, range.chain, range.begin, range.end, range.part});
    }
  }
  return to_array(ranges);
}

int most_chain_sums(int chains, int clusters) { return ChainCuts::most_sums(chains, clusters); }

// Returns the length of chains if they are worth cutting, or else 0.
int worthwhile_chain_length(Sizes const& group_sizes, Offsets const& group_offset, int batches,
                            int local_groups, int m, int units, int zeros_cost, int most_sums,
                            int clusters) {
  auto const groups = groups_of(group_sizes, group_offset, batches, local_groups, m);
  Skew<SimulatedWarp, kTileK> const skew(groups, units, zeros_cost);
  SkewedWork work;
  bool const cut = skew.is_possible() && skew.is_worth_cutting(clusters, most_sums, work);
  return cut ? work.cuts.length() : 0;
}

template <class Assignment>
TileArray assignment(int units, int steps, int clusters) {
  std::vector<std::array<int, 5>> pieces;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    Assignment own(units, steps, cluster, clusters);
    for (Piece piece; own.next(piece);) {
      pieces.push_back({cluster, piece.unit, piece.first_step, piece.steps, piece.partials});
    }
  }
  return to_array(pieces);
}

}  // namespace

void define_piece_schedules(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("ragged_noncontracting_pieces", &ragged_noncontracting_pieces, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "clusters"_a);
  module.def("scaled_ragged_noncontracting_pieces", &scaled_ragged_noncontracting_pieces,
             "group_sizes"_a, "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a,
             "tile_m"_a, "tile_n"_a, "cluster"_a, "clusters"_a);
  module.def("tails_apart_tiles", &tails_apart_tiles, "group_sizes"_a, "group_offset"_a,
             "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a, "tile_n"_a,
             "cluster"_a, "clusters"_a, "zeroes_unowned"_a = true);
  module.def("ragged_contracting_pieces", &ragged_contracting_pieces, "group_sizes"_a,
             "group_offset"_a, "batches"_a, "local_groups"_a, "m"_a, "k"_a, "n"_a, "tile_m"_a,
             "tile_n"_a, "cluster"_a, "clusters"_a, "length"_a, "longest"_a);
  module.def("chain_ranges", &chain_ranges, "chains"_a, "length"_a, "longest"_a, "clusters"_a);
  module.def("most_chain_sums", &most_chain_sums, "chains"_a, "clusters"_a);
  module.def("worthwhile_chain_length", &worthwhile_chain_length, "group_sizes"_a, "group_offset"_a,
             "batches"_a, "local_groups"_a, "m"_a, "units"_a, "zeros_cost"_a, "most_sums"_a,
             "clusters"_a);
  module.def("assignment", &assignment<Assignment>, "units"_a, "steps"_a, "clusters"_a);
  module.def("even_assignment", &assignment<EvenAssignment>, "units"_a, "steps"_a, "clusters"_a);
}

}  // namespace jgg
