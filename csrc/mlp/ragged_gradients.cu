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
  int loaded;     // how many rows to load: none if no group owns them
  int row_block;  // its number along the rows, or -1 past the last tile
  int column;     // its first column
};

struct SharedStorage {
  Staging<Source> staging[kOperands];
  TransposeBuffer transpose[kOperands];
  ColumnScales<Source> columns[kOperands];
  Tile tile[2];  // the present tile and the next one, in turns
};

// A thread's elements of a tile in memory.
class Elements {
 public:
  __device__ __forceinline__ Elements(RaggedGradients const& arguments, Tile const& tile)
      : pitch_(arguments.projections.pitch()), columns_(arguments.projections.columns) {
    PatchPosition const at;
    Projections const& p = arguments.projections;
    gate_ = static_cast<Source const*>(p.data) +
            (int64_t{2} * tile.first * pitch_ + (tile.column + 2 * at.row * pitch_ + at.column));
    dh_ = static_cast<Source const*>(arguments.dh) +
          (int64_t{1} * tile.first * columns_ + (tile.column + at.row * columns_ + at.column));
    weight_ = p.weights + (tile.first + at.row);
    rows_ = tile.loaded - at.row;
    has_dh_ = at.column < columns_ - tile.column;
  }

  // Begins to copy row i to shared memory, or zeros if the row does not exist.
  __device__ __forceinline__ void copy(int i, Staging<Source> (&to)[kOperands]) const {
    bool const exists = i < rows_;
    Source const* const gate = gate_ + 2 * i * pitch_;
    copy(gate, exists, to[kGate].piece[i][0][threadIdx.x]);
    copy(gate + pitch_, exists, to[kUp].piece[i][0][threadIdx.x]);
    copy(dh_ + i * columns_, exists && has_dh_, to[kHidden].piece[i][0][threadIdx.x]);
  }

  __device__ __forceinline__ float weight(int i) const {
    return i < rows_ ? __ldg(weight_ + i) : 0.0f;
  }

 private:
  // The predicate makes this one instruction. If the number of bytes says whether to copy zeros, as
  // in __pipeline_memcpy_async(), it becomes two instructions and a choice of addresses.
  __device__ __forceinline__ static void copy(Source const* from, bool exists, uint4& to) {
    asm volatile(
        "{\n"
        ".reg .pred missing;\n"
        "setp.eq.s32 missing, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, missing;\n"
        "}"
        :
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&to))), "l"(from), "r"(int(exists))
        : "memory");
  }

  int pitch_;
  int columns_;
  Source const* gate_;
  Source const* dh_;
  float const* weight_;
  int rows_;  // that exist from the thread's first row on
  bool has_dh_;
};

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

// Of the 16 threads that share four rows, four are left with the same row after a reduction: thread
// 4 i and the three after it have row i.
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

  GroupSizes const groups = quantize::groups_of(arguments.group_sizes, arguments.groups, p.rows);
  quantize::RowBlockCursor cursor(groups, {});
  auto const tile_at = [&](int number) -> Tile {
    if (number >= tiles) return {0, 0, 0, -1, 0};
    int const row_block = number / blocks, column = (number - row_block * blocks) * kScaleBlock;
    quantize::RowBlock const block = quantize::find_block(cursor, arguments.groups, row_block);
    return {block.first, block.rows, block.grouped ? block.rows : 0, row_block, column};
  };
  auto const find = [&](int number, Tile& tile) {
    Tile const found = tile_at(number);
    if (DeviceWarp::leads()) tile = found;
  };
  // The last warp computes no scales of columns, so it has time to find the next tiles.
  bool const finds = threadIdx.x / 32 == kTileThreads / 32 - 1;
  int number = blockIdx.x;
  if (finds) {
    find(number, shared.tile[0]);
    find(number + gridDim.x, shared.tile[1]);
  }
  __syncthreads();
  Tile tile = shared.tile[0];
  float weight[kPatchRows];
  Elements const first(arguments, tile);
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    first.copy(i, shared.staging);
    weight[i] = first.weight(i);
  }
  __pipeline_commit();

  // The transposes of a tile are stored while the next tile is computed.
  int64_t transposed = 0;  // the number of their first row
  int transposed_rows = 0;
  auto const store_transposed = [&](int which) {
    shared.transpose[which].template store<true>(
        arguments.transposed[which].q + transposed * kScaleBlock, kScaleBlock,
        {transposed_rows, kScaleBlock});
  };

#pragma unroll 1
  for (int turn = 1; tile.row_block >= 0; turn ^= 1) {
    Tile const next = shared.tile[turn];
    Elements const of_next(arguments, next);
    number += gridDim.x;
    Patch<Source> result[kOperands];
    float dweight[kPatchRows];
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      if (i < kOperands) store_transposed(i);
#pragma unroll
      for (int which = 0; which < kOperands; ++which) {
        result[which].row[i] = shared.staging[which].row(i);
      }
      dweight[i] = apply<kIsPlain>(result[kGate].row[i], result[kUp].row[i], result[kHidden].row[i],
                                   function, weight[i]);
      of_next.copy(i, shared.staging);
      weight[i] = of_next.weight(i);
    }
    __pipeline_commit();

    int64_t const first_row = tile.first;
    int const this_block = tile.column / kScaleBlock, left = columns - tile.column;
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
    transposed_rows = 0;
    if (owned) {
      transposed = int64_t{1} * tile.row_block * columns + tile.column;
      transposed_rows = left;
      int const which = threadIdx.x / kScaleBlock, mine = threadIdx.x % kScaleBlock;
      if (which < kOperands) {
        float* const scale = arguments.transposed[which].scale + transposed;
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
    }
    __syncthreads();
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
