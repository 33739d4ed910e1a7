// A step of an optimiser for blocks of 128 x 128. The FP8 forms are made from the new weights in
// shared memory, so that weights are not read again.
//
// A thread has four consecutive columns of eight rows, so loads and stores of float32 are whole
// rows of 512 bytes. The warps update consecutive rows at the same time, because memory is then
// faster. To quantise, a warp has eight consecutive rows, so that the eight FP8 numbers that a
// thread has of a column are consecutive in a row of the transpose.
#pragma once

#include "optimizer/forms.h"
#include "optimizer/quartet.h"
#include "optimizer/update.h"
#include "quantize/format.h"
#include "quantize/octet.h"
#include "quantize/scale_rule.h"

namespace jgg::optimizer {

static_assert(kScaleBlock == 32 * kQuartet);

// Returns the bits of a number's magnitude, which sort like magnitudes, or 0 for NaN and infinity.
__device__ __forceinline__ unsigned finite_magnitude(float x) {
  unsigned const bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

// Turns infinities into NaN, because the two FP8 formats treat infinities differently.
__device__ __forceinline__ float poisoned(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u ? __uint_as_float(0x7fffffffu) : x;
}

struct Shared {
  float4 updated[kScaleBlock][32];  // in registers, these would leave too few for loads
  Forms forms;
};

// Returns the place of a thread block. The thread blocks of a cluster have neighbouring blocks of
// the matrix.
__device__ __forceinline__ TileGrid::Place place_of(Exchange const& exchange, TileGrid const& grid,
                                                    ClusterShape shape) {
  unsigned const cluster = blockIdx.x / (shape.across * shape.down);
  TileGrid::Place place =
      TileGrid{grid.across / shape.across, grid.down / shape.down}.place(cluster);
  place.down = place.down * shape.down + exchange.down;
  place.across = place.across * shape.across + exchange.across;
  return place;
}

// Updates a block by `Rule` and quantises it to FP8.
//
// A rule has the `Scalars` of a step, and `applies` says whether the step is to be done. `load`
// loads four elements of each of its `Operands`. `update` updates these operands in memory, and
// returns the new weights.
template <class Rule, bool kAligned, int kBlocksOfMultiprocessor>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    update_kernel(Rule rule, Weights weights, TileGrid grid, ClusterShape shape) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  __shared__ unsigned warp_largest[kWarps];

  typename Rule::Scalars const scalars = *rule.scalars;
  if (!Rule::applies(scalars)) return;

  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Exchange exchange(shared.forms, shape);
  TileGrid::Place const place = place_of(exchange, grid, shape);
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
  exchange.await_begin();
  if (weights.q) exchange.put_plain(rows);
  if (weights.q_t) exchange.put_transposed(rows);
  exchange.complete();
  int const pitch = quantize::pitch(weights), stored = quantize::stored_columns(weights);
  int64_t const blocks_across = ceil_div(pitch, kScaleBlock), blocks_down = grid.down;
  int64_t const matrix = int64_t{1} * place.matrix * weights.rows * pitch;
  if (weights.q) {
    exchange.store_plain(weights.q + matrix, pitch, first_row, weights.rows, first_column, stored);
    if (threadIdx.x == 0) {
      weights.scale[(place.matrix * blocks_down + place.down) * blocks_across + place.across] =
          s.scale;
    }
  }
  if (weights.q_t) {
    exchange.store_transposed(weights.q_t + matrix, weights.rows, first_column, stored, first_row,
                              weights.rows);
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
  ClusterShape const shape{grid.across % 2 == 0 ? 2 : 1, grid.down % 2 == 0 ? 2 : 1};
  return with_constants(
      [&](auto aligned) {
        constexpr int kBlocks = Rule::blocks_of_multiprocessor(aligned.value);
        auto const kernel = update_kernel<Rule, aligned.value, kBlocks>;
        cudaError_t const status = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
        if (status != cudaSuccess) return status;
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {unsigned(shape.across * shape.down), 1, 1};
        cudaLaunchConfig_t launch{};
        launch.gridDim = grid.blocks(weights.matrices);
        launch.blockDim = dim3(kThreads);
        launch.dynamicSmemBytes = sizeof(Shared);
        launch.stream = stream;
        launch.attrs = &attribute;
        launch.numAttrs = 1;
        return cudaLaunchKernelEx(&launch, kernel, rule, weights, grid, shape);
      },
      Flag{weights.columns % kQuartet == 0});
}

}  // namespace jgg::optimizer
