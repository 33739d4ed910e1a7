// Selects the compiled kernel for few rows of packed matrices by the run-time arguments, and
// launches it.
#pragma once

#include <algorithm>

#include "packed/streaming.h"
#include "sm90/launch.h"

namespace jgg::packed {

template <class Config>
cudaError_t launch_streaming(Arguments const& a, cudaStream_t stream) {
  Params params = make_params(a);
  static_assert(kPartialBytes == Config::kSums * kTeamThreads * sizeof(float) + sizeof(uint32_t));
  int64_t const slots = a.workspace_bytes / kPartialBytes;
  params.partial_sums = static_cast<float*>(a.workspace);
  params.announcements =
      reinterpret_cast<uint32_t*>(params.partial_sums + slots * Config::kSums * kTeamThreads);
  GroupSizes const& groups = a.product.groups;
  int64_t const row_tiles = ceil_div(groups.rows, Config::kTileM) + int64_t(groups.groups) + 1;
  int64_t const tiles =
      std::min<int64_t>(row_tiles, groups.rows) * ceil_div(params.columns, Config::kTileN);
  int64_t const units = tiles * ceil_div(a.product.k, Config::kTileK);
  return sm90::launch_persistent<StreamingRoles<Config>>(
      params, std::min(units, slots), a.product.max_sms, stream, a.product.pairs.follow);
}

template <Format kFormat>
cudaError_t streamed(Arguments const& a, cudaStream_t stream) {
  return launch_streaming<StreamingConfig<kFormat>>(a, stream);
}

}  // namespace jgg::packed
