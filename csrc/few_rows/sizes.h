// Copies the sizes of groups to shared memory.
#pragma once

#include "few_rows/config.h"
#include "scheduler/group_sizes.h"

namespace jgg::few_rows {

// All sizes at once: a schedule that walks over many groups would wait for memory once for
// every 32.
template <class Shared>
__device__ GroupSizes read_sizes(GroupSizes groups, Shared& shared) {
  if (groups.groups > kGroupsAtOnce) return groups;
  int const lane = threadIdx.x % kWarpSize, offset = __ldg(groups.offset);
#pragma unroll 4
  for (int i = lane; i < groups.groups; i += kWarpSize) shared.sizes[i] = __ldg(groups.sizes + i);
  if (lane == 0) shared.offset = offset;
  __syncwarp();
  groups.sizes = shared.sizes;
  groups.offset = &shared.offset;
  return groups;
}

}  // namespace jgg::few_rows
