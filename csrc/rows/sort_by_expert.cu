// Sorts pairs by their experts. A block takes consecutive pairs, and each of its warps takes
// consecutive pairs of these. Each warp counts its pairs of every expert. The first place of a
// warp's pairs of an expert is the sum of three counts: all pairs of earlier experts, and the pairs
// of this expert in earlier blocks and in earlier warps of the block. From this place on, the warp
// places its pairs in their order. Nothing depends on which block or warp runs first.
#include <cstdint>

#include "rows/rows.h"

namespace jgg::rows {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAll = ~0u;
constexpr int kAhead = 4;  // pairs that a thread loads at once

// Returns the number of bins: one for each expert, and one for the pairs that go to no expert.
__host__ __device__ constexpr int bins_of(int experts) { return experts + 1; }

// Words of shared memory of a block on every GPU of compute capability 9.0.
constexpr int kSharedWords = (227 << 10) / sizeof(int);

// Returns how many warps of a block sort. Each of them has a counter for each bin in shared memory,
// which also has two counters of the block for each bin.
__host__ __device__ constexpr int warps_of(int experts) {
  int const fit = (kSharedWords - kWarps) / bins_of(experts) - 2;
  return fit < kWarps ? fit : kWarps;
}
static_assert(warps_of(kMostExperts) >= 1);

struct Range {
  int begin;
  int end;

  // Returns part `part` of `parts`. Lengths of all parts but the last are multiples of `unit`.
  __device__ Range part(int part, int parts, int unit) const {
    int const units = (end - begin + unit - 1) / unit;
    int const length = (units + parts - 1) / parts * unit;
    int const before = static_cast<int>(min(int64_t(part) * length, int64_t(end - begin)));
    return {begin + before, begin + before + min(length, end - begin - before)};
  }
};

// Calls function(pair, bin) for each of a warp's pairs, in each lane for a different pair. All
// lanes call `function` together, and a lane without a pair passes a negative bin.
template <class Function>
__device__ __forceinline__ void for_each_pair(int const* __restrict__ expert, int experts,
                                              Range pairs, Function function) {
  int const lane = threadIdx.x % kWarp;
  for (int first = pairs.begin; first < pairs.end; first += kAhead * kWarp) {
    int bin[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int const pair = first + i * kWarp + lane;
      bin[i] = -1;
      if (pair < pairs.end) {
        auto const any = static_cast<unsigned>(__ldg(expert + pair));
        bin[i] = static_cast<int>(min(any, static_cast<unsigned>(experts)));
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kWarp < pairs.end) function(first + i * kWarp + lane, bin[i]);
    }
  }
}

// Returns the sum of `value` over all earlier threads of the block.
__device__ __forceinline__ int sum_before(int value, int* warp_sums) {
  int const lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto const inclusive = [lane](int sum) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      int const other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    return sum;
  };
  int const sum = inclusive(value);
  if (lane == kWarp - 1) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = inclusive(warp_sums[lane]);
  __syncthreads();
  return sum - value + (warp > 0 ? warp_sums[warp - 1] : 0);
}

__device__ __forceinline__ Range pairs_of_block(SortArguments const& arguments) {
  return Range{0, arguments.pairs}.part(blockIdx.x, arguments.blocks, kWarp);
}

__device__ __forceinline__ int* counts_of_block(SortArguments const& arguments, int block) {
  int64_t const row = static_cast<int64_t>(blockIdx.y) * arguments.blocks + block;
  return arguments.workspace + row * bins_of(arguments.experts);
}

// Writes to the workspace how many of a block's pairs go to each expert.
__global__ void __launch_bounds__(kThreads, 1) count_kernel(SortArguments arguments) {
  extern __shared__ int count[];  // [bins]
  int const bins = bins_of(arguments.experts);
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) count[bin] = 0;
  __syncthreads();
  int const* expert = arguments.expert + static_cast<int64_t>(blockIdx.y) * arguments.pairs;
  Range const mine = pairs_of_block(arguments).part(threadIdx.x / kWarp, kWarps, kWarp);
  for_each_pair(expert, arguments.experts, mine, [&](int, int bin) {
    if (bin >= 0) atomicAdd(&count[bin], 1);
  });
  __syncthreads();
  int* const to = counts_of_block(arguments, blockIdx.x);
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) to[bin] = count[bin];
}

// Adds up the counts of each bin: those of all blocks to `total`, and those of earlier blocks to
// `before`. A warp takes 32 bins. If there are more warps than all bins need, several warps take
// the same bins, and each of them adds up a part of the blocks.
__device__ __forceinline__ void add_blocks(SortArguments const& arguments, int* total,
                                           int* before) {
  constexpr int kCounts = 16;  // that a thread loads at once
  int const bins = bins_of(arguments.experts), blocks = arguments.blocks;
  int const across = min((bins + kWarp - 1) / kWarp, kWarps), sharing = kWarps / across;
  int const warp = threadIdx.x / kWarp, group = warp / across;
  if (group >= sharing) return;
  for (int bin = warp % across * kWarp + threadIdx.x % kWarp; bin < bins; bin += across * kWarp) {
    int const* const counts = counts_of_block(arguments, 0) + bin;
    int all = 0, earlier = 0;
    for (int first = group; first < blocks; first += kCounts * sharing) {
      int count[kCounts];
#pragma unroll
      for (int i = 0; i < kCounts; ++i) {
        int const block = first + i * sharing;
        count[i] = block < blocks ? __ldg(counts + static_cast<int64_t>(block) * bins) : 0;
      }
#pragma unroll
      for (int i = 0; i < kCounts; ++i) {
        all += count[i];
        if (first + i * sharing < static_cast<int>(blockIdx.x)) earlier += count[i];
      }
    }
    atomicAdd(&total[bin], all);
    atomicAdd(&before[bin], earlier);
  }
}

template <bool kAlone>
__global__ void __launch_bounds__(kThreads, 1) place_kernel(SortArguments arguments) {
  extern __shared__ int shared[];
  int const experts = arguments.experts, bins = bins_of(experts), warps = warps_of(experts);
  int* const warp_sums = shared;            // [kWarps]
  int* const place = warp_sums + kWarps;    // [warps, bins]: counts, then places
  int* const total = place + warps * bins;  // [bins]
  int* const before = total + bins;         // [bins]
  int const words = (warps + 2) * bins;
  for (int i = threadIdx.x; i < words; i += kThreads) place[i] = 0;
  __syncthreads();

  int const warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int64_t const first_pair = static_cast<int64_t>(blockIdx.y) * arguments.pairs;
  int const* const expert = arguments.expert + first_pair;
  Range mine{0, 0};
  if (warp < warps) mine = pairs_of_block(arguments).part(warp, warps, kWarp);
  int* const my_place = place + warp * bins;
  for_each_pair(expert, experts, mine, [&](int, int bin) {
    if (bin >= 0) atomicAdd(&my_place[bin], 1);
  });
  if constexpr (!kAlone) add_blocks(arguments, total, before);
  __syncthreads();

  // Compute the start of each warp's pairs of a bin, within the bin.
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    int sum = before[bin];
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      int const count = place[w * bins + bin];
      place[w * bins + bin] = sum;
      sum += count;
    }
    if constexpr (kAlone) total[bin] = sum;
  }
  __syncthreads();

  // Compute the start of each bin.
  int const each = (bins + kThreads - 1) / kThreads, first_bin = threadIdx.x * each;
  int sum = 0;
  for (int bin = first_bin; bin < min(first_bin + each, bins); ++bin) sum += total[bin];
  sum = sum_before(sum, warp_sums);
  for (int bin = first_bin; bin < min(first_bin + each, bins); ++bin) {
    int const size = total[bin];
    if (bin < experts && blockIdx.x == 0) {
      arguments.group_sizes[static_cast<int64_t>(blockIdx.y) * experts + bin] = size;
    }
    before[bin] = sum;
    sum += size;
  }
  __syncthreads();

  for_each_pair(expert, experts, mine, [&](int pair, int bin) {
    unsigned const same = __match_any_sync(kAll, bin);
    unsigned const earlier = same & ((1u << lane) - 1);
    int at = 0;
    if (bin >= 0) at = my_place[bin];
    __syncwarp();
    if (bin >= 0) {
      if (earlier == 0) my_place[bin] = at + __popc(same);
      at += before[bin] + __popc(earlier);
      arguments.inverse[first_pair + pair] = at;
      arguments.order[first_pair + at] = pair;
    }
    __syncwarp();
  });
}

// The counters of many experts take more shared memory than a kernel gets without this attribute.
cudaError_t allow_shared(void const* kernel, int bytes) {
  constexpr int kDefaultBytes = 48 << 10;
  if (bytes <= kDefaultBytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

cudaError_t sort_by_expert(SortArguments const& arguments, cudaStream_t stream) {
  int const bins = bins_of(arguments.experts);
  if (arguments.experts > kMostExperts || arguments.blocks < 1) return cudaErrorInvalidValue;
  int const words = kWarps + (warps_of(arguments.experts) + 2) * bins;
  int const shared_bytes = words * static_cast<int>(sizeof(int));
  dim3 const grid(arguments.blocks, arguments.batches);
  auto const place = arguments.blocks == 1 ? place_kernel<true> : place_kernel<false>;
  cudaError_t status = allow_shared(reinterpret_cast<void const*>(place), shared_bytes);
  if (status != cudaSuccess) return status;
  if (arguments.blocks > 1) {
    int const count_bytes = bins * static_cast<int>(sizeof(int));
    status = allow_shared(reinterpret_cast<void const*>(count_kernel), count_bytes);
    if (status != cudaSuccess) return status;
    count_kernel<<<grid, kThreads, count_bytes, stream>>>(arguments);
    status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  place<<<grid, kThreads, shared_bytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace jgg::rows
