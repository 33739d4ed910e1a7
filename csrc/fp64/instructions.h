// Asynchronous copies into shared memory, and products on the FP64 tensor cores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cute/arch/mma_sm90.hpp>

namespace jgg::fp64 {

// Copies kBytes, or writes as many zeros, in which case `from` is not read.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, void const* from, bool read) {
  static_assert(kBytes == 8 || kBytes == 16);
  auto const shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  int const bytes = read ? kBytes : 0;
  // Only copies of 16 bytes can pass by L1, where nothing is found again.
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                 "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(from),
                 "r"(bytes));
  }
}

// Closes the group of copies that this thread has begun since the last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Waits for all of this thread's groups but the last kPending.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// sums += lhs * rhs for lhs [16, 4 kQuads] and rhs [4 kQuads, 8], spread over a warp. Lane l holds
// rows l / 4 and l / 4 + 8 of the lhs and column l / 4 of the rhs at k = l % 4 of every quad, and
// of the sums columns 2 (l % 4) and the next of rows l / 4 and l / 4 + 8.
__device__ __forceinline__ void multiply_add(double (&sums)[4], double const (&lhs)[1][2],
                                             double const (&rhs)[1]) {
  cute::SM90::MMA_16x8x4_F64F64F64F64_TN::fma(sums[0], sums[1], sums[2], sums[3], lhs[0][0],
                                              lhs[0][1], rhs[0], sums[0], sums[1], sums[2],
                                              sums[3]);
}

__device__ __forceinline__ void multiply_add(double (&sums)[4], double const (&lhs)[2][2],
                                             double const (&rhs)[2]) {
  cute::SM90::MMA_16x8x8_F64F64F64F64_TN::fma(sums[0], sums[1], sums[2], sums[3], lhs[0][0],
                                              lhs[0][1], lhs[1][0], lhs[1][1], rhs[0], rhs[1],
                                              sums[0], sums[1], sums[2], sums[3]);
}

// -x if `negative`: on the integer pipe, since the tensor cores keep the other one busy.
__device__ __forceinline__ double with_sign(double x, bool negative) {
  return __hiloint2double(__double2hiint(x) ^ (negative ? int(0x80000000) : 0), __double2loint(x));
}

// x, as a value that the compiler knows nothing about: what is computed from it is computed again,
// where it would otherwise be kept in registers.
__device__ __forceinline__ int forgotten(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace jgg::fp64
