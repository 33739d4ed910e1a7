// Issues the TMA boxes of one stage, alone or split between the CTAs of a cluster.
#pragma once

#include <cuda.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "scheduler/raster.h"

namespace jgg::sm90 {

// The L2 eviction policy of an operand.
enum class LoadHint : uint64_t {
  kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
  // Data that is not read again is evicted before other data.
  kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
};

template <int kCluster>
class BoxLoader {
 public:
  __device__ BoxLoader(uint64_t* barrier, int rank, LoadHint hint = LoadHint::kNormal)
      : barrier_(barrier), rank_(rank), hint_(static_cast<uint64_t>(hint)) {}

  // Returns a loader with another L2 policy.
  __device__ BoxLoader with(LoadHint hint) const { return {barrier_, rank_, hint}; }

  // Loads box number `box` of an operand tile. If the cluster shares the operand, its CTAs take
  // turns to load boxes, and each box goes to the same place in the shared memory of all CTAs.
  template <class... Coordinates>
  __device__ void load(CUtensorMap const& descriptor, void* destination, int box, bool shared,
                       Coordinates... coordinates) const {
    if constexpr (kCluster > 1) {
      if (shared) {
        if (box % kCluster == rank_) {
          cute::SM90_TMA_LOAD_MULTICAST::copy(&descriptor, barrier_, kEveryCta, hint_, destination,
                                              coordinates...);
        }
        return;
      }
    }
    cute::SM90_TMA_LOAD::copy(&descriptor, barrier_, hint_, destination, coordinates...);
  }

 private:
  static constexpr uint16_t kEveryCta = (1 << kCluster) - 1;

  uint64_t* barrier_;
  int rank_;
  uint64_t hint_;
};

// Loads a box of one row to the same place in the first `kCtas` CTAs of the cluster, or only into
// this CTA if kCtas is 1. The next box is not issued before the uniform registers of this box are
// free, so coordinates and addresses take only four uniform registers. With a third coordinate and
// a hint to L2, each box took 50 cycles.
template <int kCtas>
__device__ __forceinline__ void load_row(CUtensorMap const& descriptor, uint32_t barrier,
                                         uint32_t to, int column, int row) {
  if constexpr (kCtas == 1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];"
        :
        : "r"(to), "l"(&descriptor), "r"(barrier), "r"(column), "r"(row)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
        :
        : "r"(to), "l"(&descriptor), "r"(barrier), "r"(column), "r"(row),
          "h"(uint16_t((1 << kCtas) - 1))
        : "memory");
  }
}

}  // namespace jgg::sm90
