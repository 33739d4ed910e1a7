// WGMMA: descriptors of operands in shared memory, and the order in which a batch is issued.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <utility>

#include "scheduler/warp.h"
#include "sm90/config.h"

namespace jgg::sm90 {

// Moves descriptors to uniform registers, because all threads of a warpgroup have the same ones.
// Then only an addition remains between the wait for a stage and its first WGMMA.
template <class Descriptors>
__device__ auto in_uniform_registers(Descriptors const& descriptors) {
  auto first = descriptors.data();
  first.desc_.reg32_[0] = uniform(first.desc_.reg32_[0]);
  return cute::make_tensor(first, descriptors.layout());
}

// Returns the descriptors advanced by `bytes`, to another stage.
template <class Descriptors>
__device__ auto advance(Descriptors const& descriptors, int bytes) {
  constexpr int kUnit = 16;  // descriptors have addresses in units of 16 bytes
  return cute::make_tensor(descriptors.data() + bytes / kUnit, descriptors.layout());
}

// The number of columns of a warpgroup's accumulators, which have 64 rows.
template <class Accumulators>
constexpr int kColumnsOf = decltype(cute::size(std::declval<Accumulators const&>()))::value *
                           kWarpgroup / kRowsPerConsumer;

// Adds the product of one K tile, which is all of K that the descriptors cover, to the
// accumulators. If `from_zero`, the first WGMMA overwrites them. The function has to be inlined
// before other optimisations. Otherwise accumulators would be copied.
template <class Mma, class Lhs, class Rhs, class Accumulators>
__device__ __forceinline__ void issue_step(Mma& mma, Lhs const& lhs, Rhs const& rhs, bool from_zero,
                                           Accumulators& accumulators) {
  using namespace cute;
#pragma unroll
  for (int k = 0; k < size<2>(lhs); ++k) {
    mma.accumulate_ = from_zero && k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    gemm(mma, lhs(_, _, k), rhs(_, _, k), accumulators);
  }
}

// Issues a step as a batch of its own. Until the batch has been waited for, nothing else may touch
// the accumulators. Fences keep the compiler from moving accesses to them across the batch.
template <class Mma, class Lhs, class Rhs, class Accumulators>
__device__ __forceinline__ void issue_batch(Mma& mma, Lhs const& lhs, Rhs const& rhs,
                                            bool from_zero, Accumulators& accumulators) {
  using namespace cute;
  warpgroup_fence_operand(accumulators);
  warpgroup_arrive();
  issue_step(mma, lhs, rhs, from_zero, accumulators);
  warpgroup_commit_batch();
  warpgroup_fence_operand(accumulators);
}

}  // namespace jgg::sm90
