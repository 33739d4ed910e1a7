// A CTA has several tiles: 128 rows of one group by 128 columns of gate, of up and of the gradient
// of hidden. A thread computes with its own elements row by row and leaves results in shared memory
// in 16 bits. If it kept the words of all three results, it would have no registers left for two
// CTAs to share a multiprocessor. Two CTAs share one so that one of them computes while the other
// waits at a barrier or for memory.
#include <algorithm>

#include "dispatch.h"
#include "mlp/activation.h"
#include "mlp/quantized_hidden.h"
#include "multiprocessors.h"
#include "quantize/format.h"
#include "quantize/row_blocks.h"

namespace jgg::mlp {
namespace {

using quantize::ColumnScales;
using quantize::kOctet;
using quantize::kPatchesAcross;
using quantize::kPatchRows;
using quantize::kTileThreads;
using quantize::Octet;
using quantize::pack_pair;
using quantize::Patch;
using quantize::PatchPosition;
using quantize::RowBlock;
using quantize::Staging;
using quantize::TileExtent;
using quantize::TransposeBuffer;

using Source = __nv_bfloat16;

constexpr int kOperands = 3;     // gate, up and the gradient of hidden; later dgate, dup, hidden
constexpr int kTilesPerCta = 8;  // at most
constexpr int kCtasPerMultiprocessor = 2;
constexpr int kTurns = 4;  // rounds of CTAs, at least

struct SharedStorage {
  // Holds the elements of an operand, then the results in their place, then the FP8 results,
  // transposed.
  union {
    Staging<Source> staging;
    TransposeBuffer transpose;
  } operand[kOperands];
  ColumnScales<Source> columns[kOperands];
  // The number of the block of rows, because threads have no register left to keep it in.
  int row_block;
};

// Eight elements of a row.
struct Octets {
  Octet<Source> of[kOperands];

  // Replaces gate, up and the gradient of hidden by dgate, dup and hidden. Returns what these
  // columns add to the gradient of the row's weight.
  template <bool kIsPlain>
  __device__ __forceinline__ float apply(GatedFunction const& function, float weight) {
    float dweight = 0;
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      float dgate[2], dup[2], hidden[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Gated const a = gated<kIsPlain>(function, of[0][i + e], of[1][i + e]);
        float const dh = of[2][i + e], weighted = dh * weight;
        float const unweighted = a.activation * a.up;
        dweight += dh * unweighted;
        dgate[e] = weighted * a.up * a.derivative;
        dup[e] = weighted * a.activation * a.up_slope;
        hidden[e] = unweighted * weight;
      }
      of[0].word[i / 2] = pack_pair<Source>(dgate[0], dgate[1]);
      of[1].word[i / 2] = pack_pair<Source>(dup[0], dup[1]);
      of[2].word[i / 2] = pack_pair<Source>(hidden[0], hidden[1]);
    }
#pragma unroll
    for (auto& octet : of) octet.stay_packed();
    return dweight;
  }
};

template <ElementType kForward, ElementType kGradient, bool kIsPlain>
__global__ void __launch_bounds__(kTileThreads, kCtasPerMultiprocessor)
    quantize_ragged_gradients_kernel(RaggedGradients arguments, GatedFunction function,
                                     TileGrid grid, int tiles_per_cta, bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  Projections const& p = arguments.projections;
  int pitch = p.pitch(), columns = p.columns;
  TileGrid::Place const place = grid.place();
  RowBlock const block =
      quantize::find_block(arguments.group_sizes, arguments.groups, p.rows, place.down);
  int column = place.across * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, pitch);

  if (threadIdx.x == 0) shared.row_block = place.down;
  __syncthreads();
  auto const transposed_at = [&](int which, int column) {
    return arguments.transposed[which].q +
           (static_cast<int64_t>(shared.row_block) * columns + column) * kScaleBlock;
  };
  auto const scales_at = [&](int which, int column) {
    return arguments.transposed[which].scale + static_cast<int64_t>(shared.row_block) * columns +
           column;
  };
  if (!block.grouped) {
    // No product reads rows outside of all groups. With several devices, these are half of a buffer
    // or more. Only the gradients of their weights are stored, as zeros.
    int const blocks = pitch / kScaleBlock, across = (end - column) / kScaleBlock;
    for (int i = threadIdx.x; i < block.rows * across; i += kTileThreads) {
      int64_t const row = block.first + i / across;
      arguments.dweights[row * blocks + column / kScaleBlock + i % across] = 0;
    }
    return;
  }

  int first = block.first;
  auto const fetch = [&](int which, int column) {
    if (column < end) {
      int64_t const first_row = first;
      auto& staging = shared.operand[which].staging;
      if (which < 2) {
        staging.fetch(static_cast<Source const*>(p.data) + (first_row * 2 + which) * pitch + column,
                      2 * pitch, {block.rows, kScaleBlock});
      } else {
        staging.fetch(static_cast<Source const*>(arguments.dh) + first_row * columns + column,
                      columns, {block.rows, columns - column});
      }
    }
  };
  PatchPosition const at;

#pragma unroll
  for (int which = 0; which < kOperands; ++which) fetch(which, column);
#pragma unroll 1
  for (; column < end; column += kScaleBlock) {
    // Without this statement, the compiler keeps the addresses of all rows of all arrays in
    // registers for the next tile.
    asm volatile("" : "+r"(first), "+r"(pitch), "+r"(columns));
    int64_t const first_row = first;
    int const blocks = pitch / kScaleBlock, this_block = column / kScaleBlock;
    // Each thread takes only what it has fetched itself, so no barrier is needed.
    __pipeline_commit();
    __pipeline_wait_prior(0);

    quantize::LargestOfRows<Source> largest[2]{};
    Octet<Source> largest_of_columns[kOperands]{};
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      // Rows past the block stay zero.
      if (quantize::first_row_of_warp() + i >= block.rows) break;
      int const row = at.row + i;
      Octets octets;
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        octets.of[which] = shared.operand[which].staging.row(i);
      }
      // Weights are read again for each tile, from L1 after the first, because there are no
      // registers to keep them in.
      float const weight = row < block.rows ? __ldg(p.weights + first_row + row) : 0.0f;
      float dweight = octets.apply<kIsPlain>(function, weight);
#pragma unroll
      for (int distance = kPatchesAcross / 2; distance > 0; distance /= 2) {
        dweight += __shfl_xor_sync(~0u, dweight, distance);
      }
      if (threadIdx.x % kPatchesAcross == i && row < block.rows) {
        arguments.dweights[(first_row + row) * blocks + this_block] = dweight;
      }
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        Octet<Source>& octet = octets.of[which];
        uint32_t const of_row = octet.largest_after_poisoning();
        if (which < 2) largest[which].set(i, of_row);
        largest_of_columns[which].raise(octet);
        shared.operand[which].staging.set_row(i, octet);
      }
    }
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      shared.columns[which].reduce(largest_of_columns[which]);
    }
    __syncthreads();
    {
      int const which = threadIdx.x / kScaleBlock, mine = threadIdx.x % kScaleBlock;
      int const left = columns - column;
      if (which < 2) {
        shared.columns[which].template scale<kGradient>(mine, scales_at(which, column), left, true,
                                                        power_of_two);
      } else if (which == 2) {
        shared.columns[2].template scale<kForward>(mine, scales_at(2, column), left, true,
                                                   power_of_two);
      }
    }

    auto const store_transposed = [&](int which) {
      shared.operand[which].transpose.template store<true>(
          transposed_at(which, column), kScaleBlock, {columns - column, kScaleBlock});
    };
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      auto& operand = shared.operand[which];
      Patch<Source> patch = operand.staging.take();
      if (which < 2) {
        auto const inverse = quantize::scale_rows<kGradient>(
            largest[which], arguments.scale + (first_row * 2 + which) * blocks + this_block,
            2 * blocks, block.rows, power_of_two);
        patch.template store_rows<kGradient, true>(
            arguments.q + (first_row * 2 + which) * pitch + column, 2 * pitch,
            {block.rows, kScaleBlock}, [&](int i) { return inverse[i]; });
        patch.stay_packed();
      }
      // After this barrier, all threads have taken this operand, put the transpose of the previous
      // operand, and stored the transpose of the operand before that.
      __syncthreads();
      if (which >= 1) store_transposed(which - 1);
      if (which >= 2) fetch(which - 2, column + kScaleBlock);
      auto const inverse = [&](int j) { return shared.columns[which].inverse[at.column + j]; };
      if (which < 2) {
        operand.transpose.template put<kGradient>(patch, inverse);
      } else {
        operand.transpose.template put<kForward>(patch, inverse);
      }
    }
    __syncthreads();
    store_transposed(2);
    fetch(1, column + kScaleBlock);
    __syncthreads();
    fetch(2, column + kScaleBlock);
  }
}

}  // namespace

cudaError_t quantize_ragged_gradients(RaggedGradientsFormat format,
                                      RaggedGradients const& arguments, cudaStream_t stream) {
  Projections const& p = arguments.projections;
  if (p.columns % kOctet != 0) return kNotCompiled;
  int multiprocessors;
  cudaError_t const counted = count_multiprocessors(multiprocessors);
  if (counted != cudaSuccess) return counted;
  int64_t const all_tiles = int64_t{1} * p.blocks() * arguments.row_blocks;
  int const least_ctas = kTurns * kCtasPerMultiprocessor * multiprocessors;
  int tiles_per_cta =
      static_cast<int>(std::clamp<int64_t>(all_tiles / least_ctas, 1, kTilesPerCta));
  // Gives each CTA the same number of tiles.
  int const ctas_across = ceil_div(p.blocks(), tiles_per_cta);
  tiles_per_cta = ceil_div(p.blocks(), ctas_across);
  TileGrid const grid{unsigned(ctas_across), unsigned(arguments.row_blocks)};
  GatedFunction const function(p.activation);
  return with_constants(
      [&](auto forward, auto gradient, auto plain) {
        constexpr int kSharedBytes = sizeof(SharedStorage);
        auto const kernel =
            quantize_ragged_gradients_kernel<forward.value, gradient.value, plain.value>;
        cudaError_t const status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        if (status != cudaSuccess) return status;
        kernel<<<grid.blocks(), kTileThreads, kSharedBytes, stream>>>(
            arguments, function, grid, tiles_per_cta, format.power_of_two);
        return cudaGetLastError();
      },
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.forward},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.gradient}, Flag{is_plain(p.activation)});
}

}  // namespace jgg::mlp
