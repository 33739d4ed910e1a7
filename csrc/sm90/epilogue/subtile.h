// From accumulators to memory: where WGMMA leaves them, where they lie in a subtile of shared
// memory, and the steps in which a consumer stores subtiles by TMA.
//
// A subtile is 64 rows by 128 bytes with the swizzle of 128 bytes: the 16-byte units of a row are
// permuted.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "scheduler/warp.h"
#include "sm90/barrier.h"
#include "sm90/config.h"

namespace jgg::sm90 {

// Returns the address of a 16-byte unit of a row in `subtile`. Addresses are generic, or of shared
// memory.
template <class Address>
__device__ __forceinline__ Address swizzled(Address subtile, int row, int unit) {
  return subtile + row * kRowBytes + (unit ^ (row % 8)) * 16;
}

// The place of each accumulator of a thread in a consumer's half tile. In every 8 columns, thread t
// of a warp has columns 2 (t % 4) and 2 (t % 4) + 1 of rows t / 4 and t / 4 + 8.
struct AccumulatorCoordinates {
  int lane = threadIdx.x % kWarpSize;
  int warp = threadIdx.x % kWarpgroup / kWarpSize;

  __device__ int row(int i) const { return warp * 16 + i / 2 % 2 * 8 + lane / 4; }
  __device__ int column(int i) const { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

  // Returns the address of 32-bit accumulators i and i + 1 in a subtile. `i` is even.
  template <class Address>
  __device__ __forceinline__ Address pair_in(Address subtile, int i) const {
    return swizzled(subtile, row(i), i / 4 * 2 + lane % 4 / 2) + lane % 2 * 8;
  }
  // Returns the address that this lane gives to stmatrix for 16 columns of a 16-bit subtile, which
  // begin at column 16 * number. The address is that of row lane % 16, in the left half of these
  // columns if lane < 16, and in the right half otherwise.
  __device__ __forceinline__ uint8_t* matrix_in(uint8_t* subtile, int number) const {
    return swizzled(subtile, warp * 16 + lane % 16, 2 * number + lane / 16);
  }
  // Returns the address for the same columns of a subtile that is stored as its transpose.
  __device__ __forceinline__ uint8_t* transposed_matrix_in(uint8_t* subtile, int number) const {
    return swizzled(subtile, number * 16 + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  }
};

// Return the row and the column of accumulator i. They are computed anew each time, for callers
// that have no register left for the lane and the warp.
__device__ inline int accumulator_row(int i) {
  int const warp = threadIdx.x % kWarpgroup / kWarpSize, lane = threadIdx.x % kWarpSize;
  return warp * 16 + i / 2 % 2 * 8 + lane / 4;
}
__device__ inline int accumulator_column(int i) {
  return i / 4 * 8 + threadIdx.x % kWarpSize % 4 * 2 + i % 2;
}

// Writes 16 rows by 16 columns of 16-bit results for each warp. Each of a thread's four registers
// has two results.
__device__ inline void write_matrix(uint8_t* unit, uint32_t const* pairs) {
  cute::SM90_U32x4_STSM_N::copy(pairs[0], pairs[1], pairs[2], pairs[3],
                                *reinterpret_cast<cute::uint128_t*>(unit));
}

// Like write_matrix(), but writes the transpose of each of the four squares of 8 rows by 8 columns.
__device__ inline void write_transposed_matrix(uint8_t* unit, uint32_t const* pairs) {
  cute::SM90_U16x8_STSM_T::copy(pairs[0], pairs[1], pairs[2], pairs[3],
                                *reinterpret_cast<cute::uint128_t*>(unit));
}

// ---- stores of a consumer, by its first thread ----

__device__ inline bool issues_stores() { return threadIdx.x % kWarpgroup == 0; }

// Waits until all but the last kPending groups of stores have read shared memory.
template <int kPending>
__device__ inline void acquire_subtile(int consumer) {
  if (issues_stores()) cute::tma_store_wait<kPending>();
  sync_consumer(consumer);
}

// Makes what the consumer has written visible to TMA, and issues a group of stores.
template <class Issue>
__device__ inline void store_subtile(int consumer, Issue const& issue) {
  fence_async_proxy();
  sync_consumer(consumer);
  if (issues_stores()) {
    issue();
    cute::tma_store_arrive();
  }
}

// Shared memory must outlive the copies out of it.
__device__ inline void wait_for_stores() {
  if (issues_stores()) cute::tma_store_wait<0>();
}

}  // namespace jgg::sm90
