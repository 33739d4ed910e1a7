// Selects the compiled kernel for packed matrices by the run-time arguments, and launches it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "dispatch.h"
#include "packed/decoding.h"
#include "sm90/launch.h"
#include "sm90/tma/views.h"

namespace jgg::packed {

template <class Config>
cudaError_t launch_decoding(Arguments const& a, cudaStream_t stream) {
  GroupSizes const& groups = a.product.groups;
  int64_t const row_tiles = ceil_div(groups.rows, Config::kTileM) + int64_t(groups.groups) + 1;
  int64_t const units = std::min<int64_t>(row_tiles, groups.rows) *
                        ceil_div(a.product.n, Config::kTileN * Config::kCluster);
  Params params = make_params(a);
  // With fewer rows a group, TMA takes longer, probably because boxes of rows queue behind copies
  // of records.
  params.has_row_boxes =
      Config::kOnlyRowBoxes || (Config::kMayHaveRowBoxes && a.product.rows == nullptr &&
                                groups.rows >= int64_t(Config::kTileM) * groups.groups);
  if (params.has_row_boxes) {
    auto const x = sm90::view<typename Config::Element>(a.product.x);
    cudaError_t const status =
        sm90::encode_plain(&params.row_boxes, x, 1, a.product.tokens, a.product.k, kBoxRows);
    if (status != cudaSuccess) return status;
  }
  return sm90::launch_persistent<DecodingRoles<Config>>(params, units, a.product.max_sms, stream);
}

template <Format kFormat>
cudaError_t decoded(Arguments const& a, cudaStream_t stream) {
  bool const has_up = a.product.has_activation && a.up.values;
  auto const with_rows = [&](auto rows) {
    if (has_up) {
      return launch_decoding<DecodingConfig<kFormat, true, rows.value>>(a, stream);
    }
    return launch_decoding<DecodingConfig<kFormat, false, rows.value>>(a, stream);
  };
  if constexpr (has_tiles_of_few_rows(kFormat)) {
    if (a.tile_m == kFewRows) return with_rows(std::integral_constant<int, kFewRows>{});
  }
  if constexpr (has_tall_tiles(kFormat)) {
    if (a.tile_m == kTallRows && has_up && a.product.rows == nullptr) {
      return launch_decoding<DecodingConfig<kFormat, true, kTallRows>>(a, stream);
    }
  }
  if (a.tile_m != kManyRows) return kNotCompiled;
  return with_rows(std::integral_constant<int, kManyRows>{});
}

}  // namespace jgg::packed
