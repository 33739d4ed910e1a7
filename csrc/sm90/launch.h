// Launches the kernels whose shell is kernel.h.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "multiprocessors.h"
#include "sm90/kernel.h"

namespace jgg::sm90 {

// If `follows`, the kernel may begin while the previous kernel of the stream runs. It must then
// wait for the end of the previous kernel itself (`dependent_launch.h`).
template <class Role>
cudaError_t launch_clusters(typename Role::Params const& params, int64_t clusters,
                            cudaStream_t stream, bool follows = false) {
  constexpr int kCluster = Role::Config::kCluster, kSharedBytes = sizeof(typename Role::Shared);
  static_assert(kSharedBytes <= kSharedMemoryLimit, "the stages leave no room for the barriers");
  auto const kernel = persistent_kernel<Role>;
  cudaError_t const status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(clusters * kCluster);
  launch.blockDim = dim3(Role::kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = follows ? 2 : 1;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

// Launches as many clusters as run at the same time on `max_sms` multiprocessors, or one for each
// of `max_units` units of work if those are fewer. Where a part of the chip has an odd number of
// multiprocessors, fewer clusters of two run at the same time. The other clusters begin when
// earlier clusters end. This costs time, but cannot hang: a cluster waits only for clusters before
// it in the grid (`scheduler/assignment.h`).
template <class Role>
cudaError_t launch_persistent(typename Role::Params const& params, int64_t max_units, int max_sms,
                              cudaStream_t stream, bool follows = false) {
  using Config = typename Role::Config;
  int multiprocessors;
  cudaError_t const status = count_multiprocessors(multiprocessors, max_sms);
  if (status != cudaSuccess) return status;
  int64_t const most = std::clamp<int64_t>(multiprocessors * Role::kBlocks / Config::kCluster, 1,
                                           kMaxClusters<Config> * Role::kBlocks);
  int64_t const clusters = std::min<int64_t>(most, std::max<int64_t>(max_units, 1));
  return launch_clusters<Role>(params, clusters, stream, follows);
}

// Builds the kernel's parameters from `arguments`, then launches it.
template <class Role, class Arguments>
cudaError_t launch(Arguments const& arguments, cudaStream_t stream) {
  using Problem = typename Role::Problem;
  static_assert(MadeFrom<Problem, Arguments>);
  typename Role::Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  return launch_persistent<Role>(params, Problem::max_units(arguments), arguments.max_sms, stream);
}

}  // namespace jgg::sm90
