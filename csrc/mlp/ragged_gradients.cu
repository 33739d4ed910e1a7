// A tile is 128 rows of one group by 128 columns of gate, of up and of the gradient of hidden. A
// persistent thread block computes one tile after the other, with the next tile on its way to
// shared memory. Each thread copies only the elements that it will compute with. It can therefore
// take them and begin to copy the next ones to the same place without a barrier. Results stay in
// registers in 16 bits, until the scales of the columns are known.
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
using quantize::Scale;
using quantize::Staging;
using quantize::TransposeBuffer;

using Source = __nv_bfloat16;
using Words = quantize::Word<Source>;

constexpr int kOperands = 3;  // gate, up and the gradient of hidden; later dgate, dup, hidden
constexpr int kGate = 0, kUp = 1, kHidden = 2;

struct Tile {
  int first;      // its first row
  int rows;       // how many of its rows exist
  int row_block;  // its number along the rows, or -1 past the last tile
  int column;     // its first column
  int loaded;     // how many rows to load: none if no group owns them
};

struct SharedStorage {
  Staging<Source> staging[kOperands];
  TransposeBuffer transpose[kOperands];
  ColumnScales<Source> columns[kOperands];
  Tile tile[2];  // the present tile and the next one, in turns
};

// A thread's elements of a tile in memory.
struct Elements {
  Source const* gate;
  Source const* dh;
  float const* weight;
  int rows;  // that exist from the thread's first row on
  bool has_dh;
};

// Begins to copy an octet to shared memory, or zeros. The predicate makes this one instruction. If
// the number of bytes says whether to copy zeros, as in __pipeline_memcpy_async(), the compiler
// makes two instructions and a choice of addresses.
__device__ __forceinline__ void copy_octet(unsigned to, Source const* from, bool exists) {
  asm volatile(
      "{\n"
      ".reg .pred missing;\n"
      "setp.eq.s32 missing, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, missing;\n"
      "}"
      :
      : "r"(to), "l"(from), "r"(int(exists))
      : "memory");
}

// Replaces gate, up and the gradient of hidden by dgate, dup and hidden. Returns what these columns
// add to the gradient of the row's weight.
template <bool kIsPlain>
__device__ __forceinline__ float apply(Octet<Source>& of_gate, Octet<Source>& of_up,
                                       Octet<Source>& of_hidden, GatedFunction const& function,
                                       float weight) {
  float dweight = 0;
#pragma unroll
  for (int i = 0; i < kOctet; i += 2) {
    float dgate[2], dup[2], hidden[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      Gated const a = gated<kIsPlain>(function, of_gate[i + e], of_up[i + e]);
      float const dh = of_hidden[i + e], weighted = dh * weight;
      float const unweighted = a.activation * a.up;
      dweight += dh * unweighted;
      dgate[e] = weighted * a.up * a.derivative;
      dup[e] = weighted * a.activation * a.up_slope;
      hidden[e] = unweighted * weight;
    }
    of_gate.word[i / 2] = pack_pair<Source>(dgate[0], dgate[1]);
    of_up.word[i / 2] = pack_pair<Source>(dup[0], dup[1]);
    of_hidden.word[i / 2] = pack_pair<Source>(hidden[0], hidden[1]);
  }
  of_gate.stay_packed();
  of_up.stay_packed();
  of_hidden.stay_packed();
  return dweight;
}

// The largest magnitudes of a patch.
struct Largest {
  static constexpr int kPairs = kPatchRows / 2;
  Octet<Source> of_columns;
  uint32_t of_rows[kPairs];  // of two rows in each word

  __device__ __forceinline__ explicit Largest(Patch<Source> const& patch) {
    auto const largest_of_four = [](auto const& at) {
      return Words::max(Words::max(Words::max(at(0), at(1)), at(2)), at(3));
    };
    auto const magnitude = [&](int row, int word) {
      return Words::magnitude(patch.row[row].word[word]);
    };
#pragma unroll
    for (int w = 0; w < Octet<Source>::kWords; ++w) {
      of_columns.word[w] = largest_of_four([&](int row) { return magnitude(row, w); });
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint32_t const a = largest_of_four([&](int w) { return magnitude(2 * i, w); });
      uint32_t const b = largest_of_four([&](int w) { return magnitude(2 * i + 1, w); });
      of_rows[i] = Words::max(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
  }
};

// Sixteen threads share four rows. A reduction leaves each row to four of these threads: thread 4 i
// and the three after it get row i.
constexpr int kThreadsOfRow = kPatchesAcross / kPatchRows;
static_assert(kPatchRows == 4 && kThreadsOfRow == 4);
__device__ __forceinline__ bool has_lower_rows() { return threadIdx.x & 8; }
__device__ __forceinline__ bool has_odd_row() { return threadIdx.x & 4; }

// Returns the sum of the thread's row over the threads that share it.
__device__ __forceinline__ float sum_of_row(float const (&value)[kPatchRows]) {
  bool const lower = has_lower_rows(), odd = has_odd_row();
  float const even_sum = (lower ? value[2] : value[0]) +
                         __shfl_xor_sync(~0u, lower ? value[0] : value[2], 2 * kThreadsOfRow);
  float const odd_sum = (lower ? value[3] : value[1]) +
                        __shfl_xor_sync(~0u, lower ? value[1] : value[3], 2 * kThreadsOfRow);
  float sum =
      (odd ? odd_sum : even_sum) + __shfl_xor_sync(~0u, odd ? even_sum : odd_sum, kThreadsOfRow);
  sum += __shfl_xor_sync(~0u, sum, 2);
  return sum + __shfl_xor_sync(~0u, sum, 1);
}

// Returns the largest magnitude of the thread's row.
__device__ __forceinline__ float largest_of_row(uint32_t const (&of_rows)[Largest::kPairs]) {
  bool const lower = has_lower_rows();
  uint32_t const mine =
      Words::max(lower ? of_rows[1] : of_rows[0],
                 __shfl_xor_sync(~0u, lower ? of_rows[0] : of_rows[1], 2 * kThreadsOfRow));
  return Words::element(Words::max_over(mine, 2 * kThreadsOfRow), has_odd_row());
}

template <ElementType kForward, ElementType kGradient, bool kIsPlain>
__global__ void __launch_bounds__(kTileThreads, 1)
    quantize_ragged_gradients_kernel(RaggedGradients arguments, GatedFunction function, int tiles,
                                     bool power_of_two) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  Projections const& p = arguments.projections;
  int const blocks = p.blocks(), pitch = p.pitch(), columns = p.columns;
  PatchPosition const at;

  GroupSizes const groups{arguments.group_sizes, &quantize::kNoOffset, 0,     0, 1,
                          arguments.groups,      arguments.groups,     p.rows};
  SegmentCursor<DeviceWarp, quantize::BlocksOfRows> cursor(groups, quantize::BlocksOfRows{});
  auto const tile_at = [&](int number) -> Tile {
    if (number >= tiles) return {0, 0, -1, 0, 0};
    int const row_block = number / blocks, column = (number - row_block * blocks) * kScaleBlock;
    Segment segment;
    if (!cursor.seek(row_block, segment)) return {0, 0, row_block, column, 0};
    int const before = (row_block - segment.first_unit) * kScaleBlock;
    int const rows = min(segment.extent - before, kScaleBlock);
    return {segment.begin + before, rows, row_block, column,
            segment.local_group < arguments.groups ? rows : 0};
  };
  auto const find = [&](int number, Tile& tile) {
    Tile const found = tile_at(number);
    if (threadIdx.x % 32 == 0) tile = found;
  };

  int const in_gate = 2 * at.row * pitch + at.column, in_dh = at.row * columns + at.column;
  auto const elements_of = [&](Tile const& tile) -> Elements {
    return {static_cast<Source const*>(p.data) +
                (int64_t{2} * tile.first * pitch + (tile.column + in_gate)),
            static_cast<Source const*>(arguments.dh) +
                (int64_t{1} * tile.first * columns + (tile.column + in_dh)),
            p.weights + (tile.first + at.row), tile.loaded - at.row,
            at.column < columns - tile.column};
  };
  auto const staging =
      static_cast<unsigned>(__cvta_generic_to_shared(&shared.staging[0].piece[0][0][threadIdx.x]));
  auto const copy_row = [&](Elements const& of, int i) {
    constexpr int kRow = sizeof(uint4) * kTileThreads, kOperand = kPatchRows * kRow;
    bool const exists = i < of.rows;
    unsigned const to = staging + i * kRow;
    Source const* const gate = of.gate + 2 * i * pitch;
    copy_octet(to + kGate * kOperand, gate, exists);
    copy_octet(to + kUp * kOperand, gate + pitch, exists);
    copy_octet(to + kHidden * kOperand, of.dh + i * columns, exists && of.has_dh);
  };
  auto const weight_of = [&](Elements const& of, int i) {
    return i < of.rows ? __ldg(of.weight + i) : 0.0f;
  };

  int number = blockIdx.x;
  // The last warp computes no scales of columns, so it has time to find the next tile.
  bool const finds = threadIdx.x / 32 == kTileThreads / 32 - 1;
  if (finds) find(number, shared.tile[0]);
  __syncthreads();
  Tile tile = shared.tile[0];
  float weight[kPatchRows];
  {
    Elements const of_first = elements_of(tile);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      copy_row(of_first, i);
      weight[i] = weight_of(of_first, i);
    }
  }
  __pipeline_commit();
  if (finds) find(number + gridDim.x, shared.tile[1]);
  __syncthreads();

  // The transposes of a tile are stored while the next tile is computed.
  int64_t transposed = 0;  // the number of their first row
  int transposed_rows = 0;
  auto const store_transposed = [&](int which) {
    shared.transpose[which].template store<true>(
        arguments.transposed[which].q + transposed * kScaleBlock, kScaleBlock,
        {transposed_rows, kScaleBlock});
  };
#pragma unroll 1
  for (int turn = 1;; turn ^= 1) {
    Tile const next = shared.tile[turn];
    number += gridDim.x;
    __pipeline_wait_prior(0);
    Patch<Source> result[kOperands];
    float dweight[kPatchRows];
    Elements const of_next = elements_of(next);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      if (i < kOperands) store_transposed(i);
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        result[which].row[i] = shared.staging[which].row(i);
      }
      dweight[i] = apply<kIsPlain>(result[kGate].row[i], result[kUp].row[i], result[kHidden].row[i],
                                   function, weight[i]);
      copy_row(of_next, i);
      weight[i] = weight_of(of_next, i);
    }
    __pipeline_commit();

    int64_t const first_row = tile.first;
    int const this_block = tile.column / kScaleBlock;
    int const my_row = at.row + threadIdx.x / kThreadsOfRow % kPatchRows;
    bool const stores_row = threadIdx.x % kThreadsOfRow == 0 && my_row < tile.rows;
    float const sum = sum_of_row(dweight);
    // No product reads rows that no group owns. With several devices, these are half of a buffer or
    // more. Only the gradients of their weights are stored, as zeros.
    if (stores_row) arguments.dweights[(first_row + my_row) * blocks + this_block] = sum;
    bool const owned = tile.loaded > 0;
    uint32_t of_rows[2][Largest::kPairs];
    if (owned) {
      auto const reduce = [&] {
        uint32_t all = 0;
#pragma unroll
        for (int which = 0; which < kOperands; ++which) {
          Largest const largest(result[which]);
          if (which != kHidden) {
#pragma unroll
            for (int i = 0; i < Largest::kPairs; ++i) of_rows[which][i] = largest.of_rows[i];
          }
#pragma unroll
          for (uint32_t const word : largest.of_columns.word) all = Words::max(all, word);
          shared.columns[which].reduce(largest.of_columns);
        }
        return Words::any_infinite(all);
      };
      if (__any_sync(~0u, reduce())) {  // hardly ever
#pragma unroll
        for (auto& patch : result) {
#pragma unroll
          for (auto& octet : patch.row) octet.poison();
        }
        reduce();
      }
    }
    __syncthreads();
    if (finds) find(number + gridDim.x, shared.tile[turn ^ 1]);
    if (owned) {
      int const left = columns - tile.column;
      int64_t const first_transposed = int64_t{1} * tile.row_block * columns + tile.column;
      int const which = threadIdx.x / kScaleBlock, mine = threadIdx.x % kScaleBlock;
      if (which < kOperands) {
        float* const scale = arguments.transposed[which].scale + first_transposed;
        if (which != kHidden) {
          shared.columns[which].template scale<kGradient>(mine, scale, left, true, power_of_two);
        } else {
          shared.columns[kHidden].template scale<kForward>(mine, scale, left, true, power_of_two);
        }
      }
#pragma unroll
      for (int which = kGate; which <= kUp; ++which) {
        Scale const s = quantize::scale_of<kGradient>(largest_of_row(of_rows[which]), power_of_two);
        if (stores_row) {
          arguments.scale[((first_row + my_row) * 2 + which) * blocks + this_block] = s.scale;
        }
        result[which].template store_rows<kGradient, true>(
            arguments.q + (first_row * 2 + which) * pitch + tile.column, 2 * pitch,
            {tile.rows, kScaleBlock},
            [&](int i) { return __shfl_sync(~0u, s.inverse, i * kThreadsOfRow, kPatchesAcross); });
        result[which].stay_packed();
      }
      __syncthreads();
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        float inverse[kOctet];
        auto const* from =
            reinterpret_cast<float4 const*>(&shared.columns[which].inverse[at.column]);
        *reinterpret_cast<float4*>(inverse) = from[0];
        *reinterpret_cast<float4*>(inverse + 4) = from[1];
        auto const of = [&](int j) { return inverse[j]; };
        if (which != kHidden) {
          shared.transpose[which].template put<kGradient>(result[which], of);
        } else {
          shared.transpose[which].template put<kForward>(result[which], of);
        }
      }
      transposed = first_transposed;
      transposed_rows = left;
    } else {
      transposed_rows = 0;
    }
    __syncthreads();
    if (next.row_block < 0) break;
    tile = next;
  }
#pragma unroll
  for (int which = 0; which < kOperands; ++which) store_transposed(which);
}

}  // namespace

cudaError_t quantize_ragged_gradients(RaggedGradientsFormat format,
                                      RaggedGradients const& arguments, cudaStream_t stream) {
  Projections const& p = arguments.projections;
  if (p.columns % kOctet != 0) return kNotCompiled;
  int multiprocessors;
  cudaError_t const counted = count_multiprocessors(multiprocessors);
  if (counted != cudaSuccess) return counted;
  int64_t const tiles = int64_t{1} * p.blocks() * arguments.row_blocks;
  // Thread blocks look one tile past their last.
  if (tiles > INT32_MAX - 2 * multiprocessors) return cudaErrorInvalidValue;
  int const grid = static_cast<int>(std::min<int64_t>(tiles, multiprocessors));
  GatedFunction const function(p.activation);
  return with_constants(
      [&](auto forward, auto gradient, auto plain) {
        constexpr int kSharedBytes = sizeof(SharedStorage);
        auto const kernel =
            quantize_ragged_gradients_kernel<forward.value, gradient.value, plain.value>;
        cudaError_t const status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
        if (status != cudaSuccess) return status;
        kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(
            arguments, function, static_cast<int>(tiles), format.power_of_two);
        return cudaGetLastError();
      },
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.forward},
      OneOf<ElementType::kE4m3, ElementType::kE5m2>{format.gradient}, Flag{is_plain(p.activation)});
}

}  // namespace jgg::mlp
