// Copies between registers and shared or global memory that CuTe has no name for.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace jgg::mlp {

// Copy 16 rows by 16 columns of 16-bit numbers, which registers hold like WGMMA's results. Lane l
// passes the address, without kOffset, of 8 columns of row l % 16: lanes 0 to 15 have columns 0 to
// 7, and lanes 16 to 31 columns 8 to 15.
template <int kOffset>
__device__ void read_matrices(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from), "n"(kOffset)
               : "memory");
}
template <int kOffset>
__device__ void write_matrices(uint32_t to, uint32_t const* from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(to),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "n"(kOffset)
               : "memory");
}

// Starts an asynchronous copy of one number to shared memory, and does not wait for it. If
// `condition` is false, it reads nothing and writes zero.
__device__ inline void copy_or_zero(float* to, float const* from, bool condition) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
      "l"(from), "r"(condition ? 4 : 0)
      : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace jgg::mlp
