// Accumulators on their way out: a chunk of the result, 64 rows by 128 bytes, in shared memory as a
// TMA box with the widest swizzle. WGMMA leaves thread t of a warp with columns 2 (t % 4) and the
// next of rows t / 4 and t / 4 + 8 of each 8 columns.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90.hpp>

#include "scheduler/warp.h"
#include "sm90/kernel_config.h"

namespace jgg::sm90 {

// Two neighbouring accumulators, converted to a 16-bit type, in one register.
template <class Output>
__device__ uint32_t pack(float first, float second) {
  static_assert(sizeof(Output) == 2);
  cutlass::NumericArrayConverter<Output, float, 2> const convert;
  auto const pair = convert({first, second});
  return reinterpret_cast<uint32_t const&>(pair);
}

// Of 16-bit results; packed(i) is the thread's pair number i of the chunk. These are the fragments
// of stmatrix: one instruction takes 16 rows by 16 columns; lane l gives the address of row l % 16
// of its left half if l < 16, of its right half otherwise.
template <class Packed>
__device__ void write_packed_chunk(uint8_t* chunk, Packed const& packed) {
  int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
  int const row = warp * 16 + lane % 16;
#pragma unroll
  for (int square = 0; square < 4; ++square) {
    int const unit = (2 * square + lane / 16) ^ (row % 8);
    auto& target = *reinterpret_cast<cute::uint128_t*>(chunk + row * kRowBytes + unit * 16);
    cute::SM90_U32x4_STSM_N::copy(packed(4 * square), packed(4 * square + 1),
                                  packed(4 * square + 2), packed(4 * square + 3), target);
  }
}

// Through an address in shared memory: generic ones would take twice the registers.
__device__ inline void store_shared(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

// Of float32 results; values(i) is the thread's accumulator number i of the chunk.
template <class Values>
__device__ void write_float_chunk(uint8_t* chunk, Values const& values) {
  int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
  constexpr int kEights = kRowBytes / sizeof(float) / 8;
  uint32_t const address = cute::cast_smem_ptr_to_uint(chunk);
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = warp * 16 + half * 8 + lane / 4;
      int const unit = (2 * eight + lane % 4 / 2) ^ (row % 8);
      int const i = eight * 4 + half * 2;
      store_shared(address + row * kRowBytes + unit * 16 + lane % 2 * 8, values(i), values(i + 1));
    }
  }
}

}  // namespace jgg::sm90
