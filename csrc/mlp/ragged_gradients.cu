// A CTA has a column of tiles: 128 rows of one group by 128 columns of gate, of up and of the
// gradient of hidden. While it computes with one tile's, the next one's are on their way.
#include <algorithm>
#include <array>

#include "dispatch.h"
#include "mlp/activation.h"
#include "mlp/quantized_hidden.h"
#include "quantize/format.h"
#include "quantize/row_blocks.h"

namespace jgg::mlp {
namespace {

using quantize::ColumnScales;
using quantize::kOctet;
using quantize::kPatchesAcross;
using quantize::kPatchRows;
using quantize::kTileThreads;
using quantize::pack_pair;
using quantize::Patch;
using quantize::PatchPosition;
using quantize::RowBlock;
using quantize::Staging;
using quantize::TileExtent;
using quantize::TransposeBuffer;

constexpr int kOperands = 3;     // gate, up and the gradient of hidden; dgate, dup and hidden
constexpr int kTilesPerCta = 8;  // at most
constexpr int kLeastCtas = 640;

template <class Source>
struct SharedStorage {
  Staging<Source> staging[kOperands];
  TransposeBuffer transpose[kOperands];
  ColumnScales<Source> columns[kOperands];
};

// What a thread has of a tile.
template <class Source>
struct Patches {
  Patch<Source> of[kOperands];

  // Of row `r`, gate, up and the gradient of hidden become their gradients and hidden, in place.
  // Returns the gradient of the row's weight, of the patch's columns.
  template <bool kIsPlain>
  __device__ __forceinline__ float apply(int r, GatedFunction const& function, float weight) {
    float dweight = 0;
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      float dgate[2], dup[2], hidden[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Gated const a = gated<kIsPlain>(function, of[0].row[r][i + e], of[1].row[r][i + e]);
        float const dh = of[2].row[r][i + e], weighted = dh * weight;
        float const unweighted = a.activation * a.up;
        dweight += dh * unweighted;
        dgate[e] = weighted * a.up * a.derivative;
        dup[e] = weighted * a.activation * a.up_slope;
        hidden[e] = unweighted * weight;
      }
      of[0].row[r].word[i / 2] = pack_pair<Source>(dgate[0], dgate[1]);
      of[1].row[r].word[i / 2] = pack_pair<Source>(dup[0], dup[1]);
      of[2].row[r].word[i / 2] = pack_pair<Source>(hidden[0], hidden[1]);
    }
    // A row after the other: several at once take more registers than there are.
#pragma unroll
    for (auto& patch : of) patch.row[r].stay_packed();
    return dweight;
  }
};

template <class Source, ElementType kForward, ElementType kGradient, bool kIsPlain>
__global__ void __launch_bounds__(kTileThreads, 1)
    quantize_ragged_gradients_kernel(RaggedGradients arguments, GatedFunction function,
                                     int tiles_per_cta, bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Source>*>(shared_bytes);
  Projections const& p = arguments.projections;
  int pitch = p.pitch(), columns = p.columns;
  int const row_block = blockIdx.y;
  RowBlock const block =
      quantize::find_block(arguments.group_sizes, arguments.groups, p.rows, row_block);
  int column = blockIdx.x * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, pitch);

  auto const transposed_at = [&](int which, int column) {
    return arguments.transposed[which].q +
           (static_cast<int64_t>(row_block) * columns + column) * kScaleBlock;
  };
  auto const scales_at = [&](int which, int column) {
    return arguments.transposed[which].scale + static_cast<int64_t>(row_block) * columns + column;
  };
  if (block.rows == 0) {
    int const count = min(end, columns) - column;
    for (int which = 0; which < kOperands; ++which) {
      quantize::clear_columns(transposed_at(which, column), scales_at(which, column), count);
    }
    return;
  }

  int first = block.first;
  auto const fetch = [&](int column) {
    if (column < end) {
      int64_t const first_row = first;
      auto const* const gate = static_cast<Source const*>(p.data) + first_row * 2 * pitch + column;
      TileExtent const all{block.rows, kScaleBlock};
      shared.staging[0].fetch(gate, 2 * pitch, all);
      shared.staging[1].fetch(gate + pitch, 2 * pitch, all);
      shared.staging[2].fetch(
          static_cast<Source const*>(arguments.dh) + first_row * columns + column, columns,
          {block.rows, columns - column});
    }
    __pipeline_commit();
  };
  PatchPosition const at;

  fetch(column);
#pragma unroll 1
  for (; column < end; column += kScaleBlock) {
    // Otherwise the compiler keeps the addresses of all rows of all arrays for the next tile.
    asm volatile("" : "+r"(first), "+r"(pitch), "+r"(columns));
    int64_t const first_row = first;
    int const blocks = pitch / kScaleBlock;
    __pipeline_wait_prior(0);
    Patches<Source> patches;
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      patches.of[which] = shared.staging[which].take();
    }
    // A thread fetches what it takes itself, so that no barrier is needed.
    fetch(column + kScaleBlock);

    int const this_block = column / kScaleBlock;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      int const row = at.row + i;
      // From L1, but for the first tile: there are no registers to keep weights in.
      float const weight = row < block.rows ? __ldg(p.weights + first_row + row) : 0.0f;
      float dweight = patches.template apply<kIsPlain>(i, function, weight);
#pragma unroll
      for (int distance = kPatchesAcross / 2; distance > 0; distance /= 2) {
        dweight += __shfl_xor_sync(~0u, dweight, distance);
      }
      if (threadIdx.x % kPatchesAcross == i && row < block.rows) {
        arguments.dweights[(first_row + row) * blocks + this_block] = dweight;
      }
    }

    std::array<uint32_t, kPatchRows> largest[2];
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) {
        uint32_t const of_row = patches.of[which].row[i].largest_after_poisoning();
        if (which < 2) largest[which][i] = of_row;
      }
      patches.of[which].stay_packed();
      shared.columns[which].reduce(patches.of[which], block.grouped);
    }
    __syncthreads();
    {
      int const which = threadIdx.x / kScaleBlock, mine = threadIdx.x % kScaleBlock;
      int const left = columns - column;
      if (which < 2) {
        shared.columns[which].template scale<kGradient>(mine, scales_at(which, column), left,
                                                        power_of_two);
      } else if (which == 2) {
        shared.columns[2].template scale<kForward>(mine, scales_at(2, column), left, power_of_two);
      }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      auto const inverse = quantize::scale_rows<kGradient, Source>(
          largest[which], arguments.scale + (first_row * 2 + which) * blocks + this_block,
          2 * blocks, block.rows, power_of_two);
      patches.of[which].template store_rows<kGradient, true>(
          arguments.q + (first_row * 2 + which) * pitch + column, 2 * pitch,
          {block.rows, kScaleBlock}, [&](int i) { return inverse[i]; });
      patches.of[which].stay_packed();
    }
    __syncthreads();
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      if (!block.grouped) patches.of[which].clear();
      auto const inverse = [&](int j) { return shared.columns[which].inverse[at.column + j]; };
      if (which < 2) {
        shared.transpose[which].template put<kGradient>(patches.of[which], inverse);
      } else {
        shared.transpose[which].template put<kForward>(patches.of[which], inverse);
      }
    }
    __syncthreads();
#pragma unroll
    for (int which = 0; which < kOperands; ++which) {
      shared.transpose[which].template store<true>(transposed_at(which, column), kScaleBlock,
                                                   {columns - column, kScaleBlock});
    }
  }
}

}  // namespace

cudaError_t quantize_ragged_gradients(RaggedGradientsFormat format,
                                      RaggedGradients const& arguments, cudaStream_t stream) {
  Projections const& p = arguments.projections;
  if (p.columns % kOctet != 0) return cudaErrorInvalidConfiguration;
  int64_t const all_tiles = int64_t{1} * p.blocks() * arguments.row_blocks;
  int const tiles_per_cta =
      static_cast<int>(std::clamp<int64_t>(all_tiles / kLeastCtas, 1, kTilesPerCta));
  dim3 const grid(static_cast<unsigned>(ceil_div(p.blocks(), tiles_per_cta)),
                  static_cast<unsigned>(arguments.row_blocks));
  GatedFunction const function(p.activation);
  return with_constants(
      [&](auto source, auto forward, auto gradient, auto plain) {
        using Source = quantize::SourceOf<source>;
        constexpr int kSharedBytes = sizeof(SharedStorage<Source>);
        auto const kernel =
            quantize_ragged_gradients_kernel<Source, forward.value, gradient.value, plain.value>;
        cudaError_t const status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        if (status != cudaSuccess) return status;
        kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(arguments, function, tiles_per_cta,
                                                             format.power_of_two);
        return cudaGetLastError();
      },
      OneOf<ElementType::kBf16, ElementType::kF16>{format.source},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.forward},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.gradient}, Flag{is_plain(p.activation)});
}

}  // namespace jgg::mlp
