// Selects the compiled kernel for few rows of packed matrices by the run-time arguments, and
// launches it.
#pragma once

#include <algorithm>

#include "packed/streaming.h"
#include "sm90/launch.h"

namespace jgg::packed {

constexpr int64_t kEnoughTiles = 88;  // two thirds of an H200's multiprocessors

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
  // If the launch has a block for each tile, no tile of at least four steps is cut, and no block
  // waits for the sums of another. This pays if whole tiles keep enough multiprocessors busy.
  // `tiles` is an upper bound. If rows share an expert, there are fewer tiles, and these are cut.
  // If experts are on other devices, there are far fewer.
  bool const keeps_tiles = tiles >= kEnoughTiles && groups.local_groups == groups.groups;
  int64_t const units = keeps_tiles ? tiles : tiles * ceil_div(a.product.k, Config::kTileK);
  return sm90::launch_persistent<StreamingRoles<Config>>(
      params, std::min(units, slots), a.product.max_sms, stream, a.product.pairs.follow);
}

template <Format kFormat>
cudaError_t streamed(Arguments const& a, cudaStream_t stream) {
  return launch_streaming<StreamingConfig<kFormat>>(a, stream);
}

}  // namespace jgg::packed
