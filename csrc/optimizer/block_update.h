// A step of an optimiser for blocks of 128 x 128. The FP8 forms of the weights are made from the
// same registers.
//
// A thread has four consecutive columns of eight rows, so loads and stores of float32 are whole
// rows of 512 bytes. The warps update consecutive rows at the same time, which memory takes faster.
// To quantise, a warp has eight consecutive rows, so that the eight FP8 numbers that a thread has
// of a column are consecutive in a row of the transpose.
#pragma once

#include "optimizer/quartet.h"
#include "optimizer/update.h"
#include "quantize/format.h"
#include "quantize/octet.h"
#include "quantize/scale_rule.h"

namespace jgg::optimizer {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsOfWarp = kScaleBlock / kWarps;
static_assert(kRowsOfWarp == 8 && kScaleBlock == 32 * kQuartet);

// The bits of a number's magnitude, which sort as magnitudes do. NaN and infinity do not count.
__device__ __forceinline__ unsigned finite_magnitude(float x) {
  unsigned const bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

// Infinities become NaN: the FP8 formats treat them each in its own way.
__device__ __forceinline__ float poisoned(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u ? __uint_as_float(0x7fffffffu) : x;
}

// Byte j of result i is byte i of word j.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  uint32_t const a = __byte_perm(words[0], words[1], 0x5140);
  uint32_t const b = __byte_perm(words[2], words[3], 0x5140);
  uint32_t const c = __byte_perm(words[0], words[1], 0x7362);
  uint32_t const d = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(a, b, 0x5410);
  words[1] = __byte_perm(a, b, 0x7632);
  words[2] = __byte_perm(c, d, 0x5410);
  words[3] = __byte_perm(c, d, 0x7632);
}

// The FP8 transpose of a block on its way from columns of warps to whole rows of 128 bytes.
//
// Piece p of 8 bytes of a row lies at p ^ row / 4: the 32 threads of a warp write one piece each,
// to every fourth row, and so reach all banks twice.
struct Transpose {
  uint2 piece[kScaleBlock][kWarps];

  // Writes the eight rows of four columns that a thread has.
  __device__ __forceinline__ void put(uint32_t const (&rows)[kRowsOfWarp]) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t upper[4] = {rows[0], rows[1], rows[2], rows[3]};
    uint32_t lower[4] = {rows[4], rows[5], rows[6], rows[7]};
    transpose_bytes(upper);
    transpose_bytes(lower);
#pragma unroll
    for (int j = 0; j < kQuartet; ++j) {
      piece[lane * kQuartet + j][warp ^ (lane % kWarps)] = {upper[j], lower[j]};
    }
  }

  // After a barrier. `rows` and `columns` are what exists of the transpose.
  __device__ __forceinline__ void store(uint8_t* tile, int pitch, int rows, int columns) const {
    int const number = threadIdx.x % kWarps, column = number * static_cast<int>(sizeof(uint2));
    bool const is_aligned = pitch % sizeof(uint2) == 0;
#pragma unroll
    for (int row = threadIdx.x / kWarps; row < kScaleBlock; row += kThreads / kWarps) {
      uint2 const pieces = piece[row][number ^ (row / kQuartet % kWarps)];
      uint8_t* const to = tile + static_cast<int64_t>(row) * pitch + column;
      int const count = row < rows ? columns - column : 0;
      if (is_aligned) {
        quantize::store_bytes<true>(to, pieces, count);
      } else {
        quantize::store_bytes<false>(to, pieces, count);
      }
    }
  }
};

// Between the passes over a block: first its new weights, then the transpose. In registers they
// would leave too few for loads.
union Shared {
  float4 updated[kScaleBlock][32];
  Transpose transpose;
};

// Updates a block by `Rule` and quantises it to FP8.
//
// A rule has the `Scalars` of a step and says whether that `applies`; it loads four of its
// `Operands`, and `updates` them in memory, from which and from the weights it returns the new
// ones.
template <class Rule, bool kAligned, int kBlocksOfMultiprocessor>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    update_kernel(Rule rule, Weights weights, TileGrid grid) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  __shared__ unsigned warp_largest[kWarps];

  typename Rule::Scalars const scalars = *rule.scalars;
  if (!Rule::applies(scalars)) return;

  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  TileGrid::Place const place = grid.place();
  int const first_row = place.down * kScaleBlock, first_column = place.across * kScaleBlock;
  int const column = first_column + lane * kQuartet;
  int64_t const first_row_of_all = int64_t{1} * place.matrix * weights.rows + first_row;

  Elements const master{weights.master, ElementType::kF32};
  constexpr int kRows = Rule::template kRowsAtOnce<kAligned>;
  unsigned largest = 0;
#pragma unroll 1
  for (int first = warp * kRows; first < kScaleBlock; first += kWarps * kRows) {
    int64_t const at = (first_row_of_all + first) * weights.columns + column;
    auto const count = [&](int i) {
      return first_row + first + i < weights.rows ? weights.columns - column : 0;
    };
    typename Rule::Operands operands[kRows];
    Loaded old[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      operands[i] = rule.template load<kAligned>(at + i * weights.columns, count(i));
      old[i] = load<kAligned>(master, at + i * weights.columns, count(i));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int64_t const here = at + i * weights.columns;
      Quartet result = rule.template update<kAligned>(
          scalars, operands[i], old[i].as_floats(master.type), here, count(i));
      store<kAligned>(master, here, result, count(i));
      if (weights.copy.data) store<kAligned>(weights.copy, here, result, count(i));
#pragma unroll
      for (float& x : result.x) {
        largest = max(largest, finite_magnitude(x));
        x = poisoned(x);
      }
      shared.updated[first + i][lane] = {result.x[0], result.x[1], result.x[2], result.x[3]};
    }
  }
  largest = __reduce_max_sync(~0u, largest);
  if (lane == 0) warp_largest[warp] = largest;
  __syncthreads();
  largest = __reduce_max_sync(~0u, warp_largest[lane % kWarps]);

  int const row_of_block = warp * kRowsOfWarp, row = first_row + row_of_block;
  int64_t const row_of_all = first_row_of_all + row_of_block;
  quantize::Scale s;
  uint32_t rows[kRowsOfWarp];
  auto const quantize_to = [&](auto fp8) {
    s = quantize::scale_of<fp8.value>(__uint_as_float(largest), weights.power_of_two);
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      float4 const x = shared.updated[row_of_block + i][lane];
      rows[i] = quantize::convert<fp8.value>(x.x * s.inverse, x.y * s.inverse) |
                quantize::convert<fp8.value>(x.z * s.inverse, x.w * s.inverse) << 16;
    }
  };
  if (weights.fp8 == ElementType::kE4m3) {
    quantize_to(std::integral_constant<ElementType, ElementType::kE4m3>{});
  } else {
    quantize_to(std::integral_constant<ElementType, ElementType::kE5m2>{});
  }
  int const pitch = quantize::pitch(weights), stored = quantize::stored_columns(weights);
  int64_t const blocks_across = ceil_div(pitch, kScaleBlock), blocks_down = grid.down;
  if (weights.q) {
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      quantize::store_bytes<kAligned>(weights.q + (row_of_all + i) * pitch + column, rows[i],
                                      row + i < weights.rows ? stored - column : 0);
    }
    if (threadIdx.x == 0) {
      weights.scale[(place.matrix * blocks_down + place.down) * blocks_across + place.across] =
          s.scale;
    }
  }
  if (weights.q_t) {
    __syncthreads();
    shared.transpose.put(rows);
    __syncthreads();
    int64_t const row_t = int64_t{1} * place.matrix * pitch + first_column;
    shared.transpose.store(weights.q_t + row_t * weights.rows + first_row, weights.rows,
                           stored - first_column, weights.rows - first_row);
    if (threadIdx.x == 0) {
      weights.scale_t[(place.matrix * blocks_across + place.across) * blocks_down + place.down] =
          s.scale;
    }
  }
}

template <class Rule>
cudaError_t launch(Rule const& rule, Weights const& weights, cudaStream_t stream) {
  TileGrid const grid{unsigned(quantize::blocks_of(weights.columns)),
                      unsigned(quantize::blocks_of(weights.rows))};
  return with_constants(
      [&](auto aligned) {
        constexpr int kBlocks = Rule::blocks_of_multiprocessor(aligned.value);
        auto const kernel = update_kernel<Rule, aligned.value, kBlocks>;
        cudaError_t const status = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
        if (status != cudaSuccess) return status;
        kernel<<<grid.blocks(weights.matrices), kThreads, sizeof(Shared), stream>>>(rule, weights,
                                                                                    grid);
        return cudaGetLastError();
      },
      Flag{weights.columns % kQuartet == 0});
}

}  // namespace jgg::optimizer
