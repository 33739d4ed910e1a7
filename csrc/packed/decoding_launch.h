// Selects the compiled kernel for packed matrices by the run-time arguments, and launches it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "dispatch.h"
#include "packed/decoding.h"
#include "sm90/launch.h"

namespace jgg::packed {

template <class Config>
cudaError_t launch_decoding(Arguments const& a, cudaStream_t stream) {
  GroupSizes const& groups = a.product.groups;
  int64_t const row_tiles = ceil_div(groups.rows, Config::kTileM) + int64_t(groups.groups) + 1;
  int64_t const units =
      std::min<int64_t>(row_tiles, groups.rows) * ceil_div(a.product.n, Config::kTileN);
  return sm90::launch_persistent<DecodingRoles<Config>>(make_params(a), units, a.product.max_sms,
                                                        stream);
}

template <Format kFormat>
cudaError_t decoded(Arguments const& a, cudaStream_t stream) {
  auto const with_rows = [&](auto rows) {
    if (a.product.has_activation && a.up.values) {
      return launch_decoding<DecodingConfig<kFormat, true, rows.value>>(a, stream);
    }
    return launch_decoding<DecodingConfig<kFormat, false, rows.value>>(a, stream);
  };
  if constexpr (has_tiles_of_few_rows(kFormat)) {
    if (a.tile_m == kFewRows) return with_rows(std::integral_constant<int, kFewRows>{});
  }
  if (a.tile_m != kManyRows) return kNotCompiled;
  return with_rows(std::integral_constant<int, kManyRows>{});
}

}  // namespace jgg::packed
