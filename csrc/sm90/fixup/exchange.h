// Exchanges the partial sums of a tile if each CTA of a cluster has computed half of its steps.
// Each CTA adds up half of the columns. The sums go from registers to the other CTA's shared
// memory, into the slots that results leave through.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "sm90/barrier.h"
#include "sm90/config.h"

namespace jgg::sm90 {

// The barriers of each consumer of a CTA.
struct ExchangeBarriers {
  Barrier free[kConsumers];  // the other CTA's slots are free
  Barrier full[kConsumers];  // the consumer's own slots are full
};

template <class Config>
struct ExchangingStorage : SharedStorage<Config> {
  ExchangeBarriers exchange;
};

// One thread calls this.
inline __device__ void initialize_exchange(ExchangeBarriers& barriers) {
  for (int i = 0; i < kConsumers; ++i) {
    barriers.free[i].init(1);
    barriers.full[i].init(1);
  }
}

// Returns block `rank` of the accumulators' two blocks of columns, with the other CTA's block
// added. A consumer calls this when no copy reads its slots any more.
template <class Config, class Accumulators>
__device__ auto exchange_halves(ExchangingStorage<Config>& shared, int consumer, int rank,
                                unsigned phase, Accumulators const& accumulators) {
  using namespace cute;
  constexpr int kOwn = decltype(size(accumulators))::value / 2, kVectors = kOwn / 4;
  constexpr unsigned kBytes = kOwn * kWarpgroup * sizeof(float);
  static_assert(kBytes <= sizeof(shared.subtiles[0]));
  int const thread = threadIdx.x % kWarpgroup;
  Barrier& free = shared.exchange.free[consumer];
  Barrier& full = shared.exchange.full[consumer];
  auto* const slots = reinterpret_cast<float4*>(&shared.subtiles[consumer][0][0]);
  if (thread == 0) {
    full.arrive_and_expect_tx(kBytes);
    free.arrive(1 - rank, true);
  }
  uint32_t const there = set_block_rank(cast_smem_ptr_to_uint(slots + thread), 1 - rank);
  uint32_t const full_there = set_block_rank(cast_smem_ptr_to_uint(full.address()), 1 - rank);
  auto const value = [&](bool own, int i) {
    // Select and do not index, because registers have no addresses.
    return own == (rank == 0) ? accumulators(i) : accumulators(kOwn + i);
  };
  free.wait(phase);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(there + i * kWarpgroup * 16),
        "f"(value(false, 4 * i)), "f"(value(false, 4 * i + 1)), "f"(value(false, 4 * i + 2)),
        "f"(value(false, 4 * i + 3)), "r"(full_there)
        : "memory");
  }
  auto sums = make_tensor<float>(Shape<Int<kOwn>>{});
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sums(i) = value(true, i);
  full.wait(phase);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float4 const other = slots[i * kWarpgroup + thread];
    sums(4 * i) += other.x;
    sums(4 * i + 1) += other.y;
    sums(4 * i + 2) += other.z;
    sums(4 * i + 3) += other.w;
  }
  return sums;
}

}  // namespace jgg::sm90
