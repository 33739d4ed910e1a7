// Stores of results by TMA.
#pragma once

#include <cuda.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

namespace jgg::sm90 {

// The L2 eviction policy of a result.
enum class StoreHint : uint64_t {
  kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
  // The result leaves L2 as soon as room is needed. This is up to 8 % faster if results are most of
  // the traffic, and up to 5 % slower if products take longer than results.
  kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
};

// The place of a consumer's half tile: coordinates of its first subtile for the store descriptor.
struct StoreCoordinates {
  int column;
  int row;
  int outer;
};

// The results of a launch that computes two, whose columns follow each other: column `second` is
// the first column of the second result, and a multiple of a subtile's columns.
struct TwoResults {
  CUtensorMap of[2];
  int second;
};

// A launch whose tiles belong to either of two results has two descriptors, one after the other.
// The outer coordinate says which result a tile belongs to: in_second() turns the coordinate of the
// first result into that of the second, and back.
__device__ inline int in_second(int outer) { return ~outer; }
__device__ inline bool is_in_second(int outer) { return outer < 0; }

// Stores a box from an address in shared memory.
__device__ inline void store_box(CUtensorMap const& descriptor, uint32_t from, int a, int b, int c,
                                 StoreHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4}], [%1], %5;"
      :
      : "l"(&descriptor), "r"(from), "r"(a), "r"(b), "r"(c), "l"(static_cast<uint64_t>(hint))
      : "memory");
}
__device__ inline void store_box(CUtensorMap const& descriptor, void const* from, int a, int b,
                                 int c, StoreHint hint) {
  store_box(descriptor, cute::cast_smem_ptr_to_uint(from), a, b, c, hint);
}

}  // namespace jgg::sm90
