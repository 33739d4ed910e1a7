// Asynchronous copies into shared memory, and products on the FP64 tensor cores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cute/arch/mma_sm90.hpp>

namespace jgg::fp64 {

// Copies kBytes if `read`. Otherwise it writes zeros and does not read `from`.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, void const* from, bool read) {
  static_assert(kBytes == 8 || kBytes == 16);
  auto const shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  int const bytes = read ? kBytes : 0;
  // Copies of 16 bytes can bypass L1, and do so because nothing in L1 would be read again.
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

// Waits for all groups of this thread except the last kPending.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Adds lhs * rhs to sums, for lhs [16, 4 kQuads] and rhs [4 kQuads, 8], spread over a warp. At k =
// l % 4 of every quad, lane l holds rows l / 4 and l / 4 + 8 of the lhs and column l / 4 of the
// rhs. Lane l has the sums of rows l / 4 and l / 4 + 8 in columns 2 (l % 4) and 2 (l % 4) + 1.
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

// Returns -x if `negative`, otherwise x. This uses the integer pipe, because the tensor cores keep
// the FP64 pipe busy.
__device__ __forceinline__ double with_sign(double x, bool negative) {
  return __hiloint2double(__double2hiint(x) ^ (negative ? int(0x80000000) : 0), __double2loint(x));
}

// Returns x as a value that the compiler knows nothing about. The compiler then recomputes values
// that depend on x, instead of keeping them in registers.
__device__ __forceinline__ int forgotten(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace jgg::fp64
