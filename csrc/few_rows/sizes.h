// The sizes of groups in shared memory, and the order of pairs.
#pragma once

#include "few_rows/config.h"
#include "few_rows/params.h"
#include "scheduler/group_sizes.h"
#include "sm90/barrier.h"

namespace jgg::few_rows {

constexpr int kPairsSorted = 4;  // a named barrier; the kernels' own barriers have smaller numbers

// Reads all sizes at once, because a schedule that walks over many groups would wait for memory
// once for every 32 groups.
__device__ inline void read_sizes(GroupSizes const& groups, Groups& shared) {
  int const lane = threadIdx.x % kWarpSize;
#pragma unroll 4
  for (int i = lane; i < groups.groups; i += kWarpSize) shared.sizes[i] = __ldg(groups.sizes + i);
}

// Sorts pairs by group and then by number into `shared.order`, and counts the pairs of each group
// in `shared.sizes`. The place of a pair is the number of smaller keys. `shared.order` has the keys
// until all places are known. Numbers up to kMost that are no pairs come after all pairs.
//
// One of the warps that bring rows calls this before it knows any rows. If the warp that schedules
// had this code, each launch would take up to 2 us longer with a cold instruction cache, even if
// nothing is sorted.
__device__ inline void sort_pairs(int const* group_of, GroupSizes const& of, Groups& shared) {
  if (group_of == nullptr) return;
  constexpr int kMost = mlp::Pairs::kMost, kOwn = kMost / kWarpSize;
  int const lane = threadIdx.x % kWarpSize, pairs = of.rows, groups = of.groups;
  unsigned keys[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const pair = lane + i * kWarpSize;
    unsigned const group = pair < pairs ? __ldg(group_of + pair) : ~0u;
    keys[i] = min(group, unsigned(groups)) * kMost + pair;
    shared.order[pair] = keys[i];
  }
  for (int i = lane; i < groups; i += kWarpSize) shared.sizes[i] = 0;
  __syncwarp();
  int places[kOwn] = {};
#pragma unroll 1
  for (int first = 0; first < pairs; first += 4) {
    int4 const four = *reinterpret_cast<int4 const*>(shared.order + first);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      for (int const key : {four.x, four.y, four.z, four.w}) places[i] += unsigned(key) < keys[i];
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const pair = lane + i * kWarpSize, group = keys[i] / kMost;
    shared.order[places[i]] = pair;
    if (group < groups) atomicAdd(shared.sizes + group, 1);
  }
  sm90::arrive_named(2 * kWarpSize, kPairsSorted);
}

// Returns the groups, with sizes in shared memory if there is room. The warp that schedules calls
// this. Other warps need no barrier for the order of pairs, because they read it only after they
// have received a tile from this warp.
__device__ inline GroupSizes read_groups(int const* group_of, GroupSizes groups, Groups& shared) {
  bool const sorts = group_of != nullptr;
  if (!sorts && groups.groups > kGroupsAtOnce) return groups;
  int const offset = __ldg(groups.offset);
  if (sorts) {
    sm90::sync_named(2 * kWarpSize, kPairsSorted);
  } else {
    read_sizes(groups, shared);
  }
  if (threadIdx.x % kWarpSize == 0) shared.offset = offset;
  __syncwarp();
  groups.sizes = shared.sizes;
  groups.offset = &shared.offset;
  return groups;
}

}  // namespace jgg::few_rows
