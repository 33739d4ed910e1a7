// Facts about the kernels that Python's plans need: tiles, and the sizes of workspaces.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "fp64/tile_table.h"
#include "grouped/grouped_gemm.h"
#include "grouped/tiles.h"
#include "module.h"
#include "parts/listed_workspace.h"
#include "ragged/parts_workspace.h"
#include "ragged/ragged_dot.h"
#include "ragged/tiles.h"
#include "rank_k/tiles.h"
#include "scaled/tiles.h"
#include "scheduler/partial_sums.h"

namespace jgg {
namespace {

template <class... Tiles>
void append(nb::list& configs, char const* op, TileTable<Tiles...>) {
  for (TileConfig const& tile : {Tiles::kConfig...}) {
    nb::dict config;
    config["op"] = op;
    config["tile_m"] = tile.tile_m;
    config["tile_n"] = tile.tile_n;
    config["cluster"] = tile.cluster;
    configs.append(config);
  }
}

nb::list kernel_configs() {
  using fp64::TilesOf;
  nb::list configs;
  append(configs, "ragged_noncontracting", sm90::NoncontractingTiles{});
  append(configs, "ragged_noncontracting_stream_k", sm90::StreamKTiles{});
  append(configs, "ragged_contracting", sm90::ContractingTiles{});
  append(configs, "weight_gradients", sm90::WeightGradientTiles{});
  append(configs, "grouped_gemm", sm90::GroupedGemmTiles{});
  append(configs, "grouped_gemm_f64", TilesOf<ElementType::kF64>::Table{});
  append(configs, "grouped_gemm_c64", TilesOf<ElementType::kC64>::Table{});
  append(configs, "grouped_gemm_c128", TilesOf<ElementType::kC128>::Table{});
  append(configs, "rank_k", sm90::RankKTiles{});
  append(configs, "rank_k_f64", TilesOf<ElementType::kF64>::Table{});
  append(configs, "rank_k_c64", TilesOf<ElementType::kC64>::Table{});
  append(configs, "rank_k_c128", TilesOf<ElementType::kC128>::Table{});
  append(configs, "scaled_ragged_noncontracting", sm90::ScaledNoncontractingTiles{});
  append(configs, "scaled_ragged_noncontracting", sm90::ScaledSwappedTiles{});
  append(configs, "scaled_ragged_noncontracting_stream_k", sm90::ScaledStreamKTiles{});
  append(configs, "scaled_ragged_contracting", sm90::ScaledContractingTiles{});
  return configs;
}

int64_t stream_k_workspace_bytes(int tile_m, int tile_n, int /*cluster*/, int blocks) {
  return blocks * PartialSumsWorkspace::block_bytes(tile_m, tile_n);
}

// Returns the bytes of workspace that a handler demands for float32 operands.
int64_t float32_workspace_bytes(bool contracting, bool lhs_batched, bool rhs_batched,
                                bool sizes_batched, bool offset_batched, int batches,
                                int local_groups, int m, int k, int n, int terms) {
  RaggedDotArguments arguments{};
  arguments.contracting = contracting;
  arguments.lhs_batched = lhs_batched;
  arguments.rhs_batched = rhs_batched;
  arguments.groups.sizes_batch_stride = sizes_batched;
  arguments.groups.offset_batch_stride = offset_batched;
  arguments.groups.batches = batches;
  arguments.groups.local_groups = local_groups;
  arguments.groups.rows = m;
  arguments.k = k;
  arguments.n = n;
  arguments.accuracy = terms == 1 ? Accuracy::kTf32 : Accuracy::kF32;
  return RaggedWorkspace(arguments).bytes();
}

// Returns the bytes of workspace for lists of float32 operands. An entry of `stacks` has the number
// of matrices of a stack and the number of elements of a matrix.
int64_t float32_list_workspace_bytes(std::vector<std::pair<int, int64_t>> const& stacks,
                                     int terms) {
  std::vector<parts::MatrixStack> operands;
  for (auto const& [matrices, elements] : stacks) operands.push_back({nullptr, matrices, elements});
  return parts::ListedWorkspace(operands, terms == 1 ? Accuracy::kTf32 : Accuracy::kF32, nullptr)
      .bytes();
}

}  // namespace

void define_layouts(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("kernel_configs", &kernel_configs);
  module.def("stream_k_workspace_bytes", &stream_k_workspace_bytes, "tile_m"_a, "tile_n"_a,
             "cluster"_a, "blocks"_a);
  module.def("float32_workspace_bytes", &float32_workspace_bytes, "contracting"_a, "lhs_batched"_a,
             "rhs_batched"_a, "sizes_batched"_a, "offset_batched"_a, "batches"_a, "local_groups"_a,
             "m"_a, "k"_a, "n"_a, "terms"_a);
  module.def("float32_list_workspace_bytes", &float32_list_workspace_bytes, "stacks"_a, "terms"_a);
  module.attr("MAX_LISTED_PROBLEMS") = kMaxListedProblems;
}

}  // namespace jgg
