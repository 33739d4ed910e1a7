// The Python module jax_grouped_gemm._extension: hands the XLA FFI handlers to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/handlers.h"
#include "ffi/schedules.h"
#include "fp64/gemm.h"
#include "fp64/rank_k.h"
#include "fp8/scaled_tiles.h"
#include "grouped/grouped_gemm.h"
#include "rank_k/rank_k.h"
#include "sm90/f32/list_workspace.h"
#include "sm90/f32/workspace.h"
#include "sm90/ragged_dot.h"
#include "sm90/stream_k/tile_table.h"
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
  targets["jax_grouped_gemm.ragged_noncontracting.v3"] = encapsulate(JggRaggedNoncontracting);
  targets["jax_grouped_gemm.ragged_contracting.v3"] = encapsulate(JggRaggedContracting);
  targets["jax_grouped_gemm.ragged_accumulate.v1"] = encapsulate(JggRaggedAccumulate);
  targets["jax_grouped_gemm.grouped_gemm.v1"] = encapsulate(JggGroupedGemm);
  targets["jax_grouped_gemm.grouped_gemm_f32.v1"] = encapsulate(JggGroupedGemmF32);
  targets["jax_grouped_gemm.grouped_gemm_fp64.v1"] = encapsulate(JggGroupedGemmFp64);
  targets["jax_grouped_gemm.rank_k.v2"] = encapsulate(JggRankK);
  targets["jax_grouped_gemm.rank_k_f32.v2"] = encapsulate(JggRankKF32);
  targets["jax_grouped_gemm.rank_k_fp64.v2"] = encapsulate(JggRankKFp64);
  targets["jax_grouped_gemm.quantize_rows.v1"] = encapsulate(JggQuantizeRows);
  targets["jax_grouped_gemm.quantize_blocks.v1"] = encapsulate(JggQuantizeBlocks);
  targets["jax_grouped_gemm.quantize_ragged.v1"] = encapsulate(JggQuantizeRagged);
  targets["jax_grouped_gemm.sort_by_expert.v1"] = encapsulate(JggSortByExpert);
  targets["jax_grouped_gemm.gather_rows.v1"] = encapsulate(JggGatherRows);
  targets["jax_grouped_gemm.dispatch_rows.v1"] = encapsulate(JggDispatchRows);
  targets["jax_grouped_gemm.combine_rows.v1"] = encapsulate(JggCombineRows);
  targets["jax_grouped_gemm.row_dots.v1"] = encapsulate(JggRowDots);
  targets["jax_grouped_gemm.scaled_ragged_noncontracting.v4"] =
      encapsulate(JggScaledRaggedNoncontracting);
  targets["jax_grouped_gemm.scaled_ragged_contracting.v3"] =
      encapsulate(JggScaledRaggedContracting);
  targets["jax_grouped_gemm.gated_ragged_dot.v1"] = encapsulate(JggGatedRaggedDot);
  targets["jax_grouped_gemm.gated_ragged_dot_transpose.v1"] =
      encapsulate(JggGatedRaggedDotTranspose);
  targets["jax_grouped_gemm.paired_ragged_dot.v1"] = encapsulate(JggPairedRaggedDot);
  return targets;
}

// XLA refuses handlers with newer headers than its own, but so late that no backend initialises.
// Python compares versions first, where the error can still say what is wrong.
std::pair<int, int> ffi_api_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

void append_config(nb::list& configs, char const* op, int tile_m, int tile_n, int cluster) {
  nb::dict config;
  config["op"] = op;
  config["tile_m"] = tile_m;
  config["tile_n"] = tile_n;
  config["cluster"] = cluster;
  configs.append(config);
}

template <class... Tiles>
void append_configs(nb::list& configs, char const* op, fp8::TileList<Tiles...>) {
  (append_config(configs, op, Tiles::kTileM, Tiles::kTileN, Tiles::kCluster), ...);
}

nb::list kernel_configs() {
  nb::list configs;
  auto const append = [&](char const* op, std::vector<sm90::TileConfig> const& tiles) {
    for (sm90::TileConfig const& tile : tiles) {
      append_config(configs, op, tile.tile_m, tile.tile_n, tile.cluster);
    }
  };
  append("ragged_noncontracting", sm90::noncontracting_tile_configs());
  append("ragged_contracting", sm90::contracting_tile_configs());
  append("grouped_gemm", sm90::grouped_gemm_tile_configs());
  append("grouped_gemm_f64", fp64::gemm_tile_configs(fp64::ElementType::kF64));
  append("grouped_gemm_c64", fp64::gemm_tile_configs(fp64::ElementType::kC64));
  append("grouped_gemm_c128", fp64::gemm_tile_configs(fp64::ElementType::kC128));
  append("ragged_noncontracting_stream_k", sm90::list(sm90::stream_k::Tiles{}));
  append("rank_k", sm90::rank_k_tile_configs());
  append("rank_k_f64", fp64::rank_k_tile_configs(fp64::ElementType::kF64));
  append("rank_k_c64", fp64::rank_k_tile_configs(fp64::ElementType::kC64));
  append("rank_k_c128", fp64::rank_k_tile_configs(fp64::ElementType::kC128));
  append_configs(configs, "scaled_ragged_noncontracting", fp8::NoncontractingTiles{});
  append_configs(configs, "scaled_ragged_noncontracting", fp8::TransposedTiles{});
  append_configs(configs, "scaled_ragged_noncontracting_stream_k", fp8::StreamKTiles{});
  append_configs(configs, "scaled_ragged_contracting", fp8::ContractingTiles{});
  return configs;
}

int64_t stream_k_workspace_bytes(int tile_m, int tile_n, int cluster, int blocks) {
  return sm90::stream_k_workspace_bytes({tile_m, tile_n, cluster}, blocks);
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

// The same of lists of float32 operands: `stacks` are of matrices and the elements of each.
int64_t float32_list_workspace_bytes(std::vector<std::pair<int, int64_t>> const& stacks,
                                     int terms) {
  std::vector<sm90::f32::MatrixStack> operands;
  for (auto const& [matrices, elements] : stacks) operands.push_back({nullptr, matrices, elements});
  return sm90::f32::ListWorkspace(operands, terms, nullptr).bytes();
}

}  // namespace
}  // namespace jgg

NB_MODULE(_extension, module) {
  using nanobind::literals::operator""_a;
  module.def("registrations", &jgg::registrations);
  module.def("ffi_api_version", &jgg::ffi_api_version);
  module.def("kernel_configs", &jgg::kernel_configs);
  module.def("stream_k_workspace_bytes", &jgg::stream_k_workspace_bytes, "tile_m"_a, "tile_n"_a,
             "cluster"_a, "blocks"_a);
  module.def("float32_workspace_bytes", &jgg::float32_workspace_bytes, "contracting"_a,
             "lhs_batched"_a, "rhs_batched"_a, "sizes_batched"_a, "offset_batched"_a, "batches"_a,
             "local_groups"_a, "m"_a, "k"_a, "n"_a, "terms"_a);
  module.def("float32_list_workspace_bytes", &jgg::float32_list_workspace_bytes, "stacks"_a,
             "terms"_a);
  module.attr("MAX_LISTED_PROBLEMS") = jgg::sm90::kMaxListedProblems;
  jgg::define_schedules(module);
  jgg::define_piece_schedules(module);
}
