// From run-time arguments to one compiled kernel for few rows of packed matrices, and its launch.
#pragma once

#include <algorithm>

#include "dispatch.h"
#include "packed/streaming.h"
#include "sm90/launch.h"

namespace jgg::packed {

// How many shares there are of a product, at most.
template <class Config>
int64_t units_of(Arguments const& a) {
  GroupSizes const& groups = a.product.groups;
  int64_t const row_tiles = ceil_div(groups.rows, Config::kTileM) + int64_t(groups.groups) + 1;
  return std::min<int64_t>(row_tiles, groups.rows) * ceil_div(a.product.n, Config::kTileN) *
         ceil_div(a.product.k, Config::kTileK);
}

inline int64_t slots_of(Arguments const& a) { return a.workspace_bytes / kPartialBytes; }

template <class Config>
Params make_streaming_params(Arguments const& a) {
  static_assert(kPartialBytes == Config::kSums * kTeamThreads * sizeof(float) + sizeof(uint32_t));
  Params params = make_params(a);
  params.partial_sums = static_cast<float*>(a.workspace);
  params.announcements =
      reinterpret_cast<uint32_t*>(params.partial_sums + slots_of(a) * Config::kSums * kTeamThreads);
  return params;
}

template <class Config>
cudaError_t launch_streaming(Arguments const& a, cudaStream_t stream) {
  int64_t const units = std::min(units_of<Config>(a), slots_of(a));
  return sm90::launch_persistent<StreamingRoles<Config>>(make_streaming_params<Config>(a), units,
                                                         a.product.max_sms, stream);
}

template <class Role>
cudaError_t launch_streaming_mlp(Arguments const& hidden, Arguments const& down,
                                 cudaStream_t stream) {
  using Config = typename Role::Config;
  using Down = typename Role::DownConfig;
  int64_t const units = std::max(units_of<Config>(hidden), units_of<Down>(down));
  MlpParams const params{make_streaming_params<Config>(hidden), make_streaming_params<Down>(down)};
  return sm90::launch_persistent<Role>(params, std::min(units, slots_of(hidden)),
                                       hidden.product.max_sms, stream);
}

template <Format kFormat>
cudaError_t streamed(Arguments const& a, cudaStream_t stream) {
  if (a.product.has_activation && a.up.values) {
    return launch_streaming<StreamingConfig<kFormat, true>>(a, stream);
  }
  return launch_streaming<StreamingConfig<kFormat, false>>(a, stream);
}

template <Format kFormat>
cudaError_t streamed_mlp(Arguments const& hidden, Arguments const& down, cudaStream_t stream) {
  if (!hidden.up.values) return kNotCompiled;
  return launch_streaming_mlp<StreamingMlpRoles<kFormat, true>>(hidden, down, stream);
}

}  // namespace jgg::packed
