// Writes the results of groups without rows, in warps that have nothing else to do.
#pragma once

#include <cstdint>

#include "scheduler/segment_cursor.h"
#include "scheduler/warp.h"

namespace jgg::sm90 {

// One or two stacked results of the same shape in memory, as 16-byte vectors.
struct ResultMatrices {
  uint4* data[2];   // [batches, local_groups, vectors] each; the second may be null
  int64_t vectors;  // of each matrix
};

// Rows are multiples of 16 bytes, because their descriptors demand this.
template <class Output>
ResultMatrices result_matrices(int64_t rows, int64_t columns, void* first, void* second = nullptr) {
  return {{static_cast<uint4*>(first), static_cast<uint4*>(second)},
          rows * columns * int64_t(sizeof(Output)) / int64_t(sizeof(uint4))};
}

// A warp writes 8 KB at a time.
constexpr int kChunkVectors = 512;

// Returns how many chunks of zeros a group needs. Only local groups without rows need any.
struct EmptyChunks {
  int local_groups;
  int chunks;  // of each group's matrices

  __device__ int operator()(int local_group, int begin, int end) const {
    return local_group >= 0 && local_group < local_groups && begin == end ? chunks : 0;
  }
};

// Return the number of chunks of a matrix, and of the one or two matrices of a group.
__device__ inline int chunks_of_one(ResultMatrices const& results) {
  return static_cast<int>((results.vectors + kChunkVectors - 1) / kChunkVectors);
}
__device__ inline int chunks_of(ResultMatrices const& results) {
  return chunks_of_one(results) * (results.data[1] == nullptr ? 1 : 2);
}

// Writes this thread block's share of the zeros. All blocks have equal shares, and write
// neighbouring chunks at the same time. When a warp has written a chunk, it takes the next chunk of
// its block's share, but waits until `cycles_a_chunk` cycles have passed for each earlier chunk.
// Without the wait, memory would serve nothing but zeros. `taken` is in shared memory, zero at
// first.
__device__ inline void write_zeros(GroupSizes const& groups, ResultMatrices const& results,
                                   unsigned* taken, unsigned cycles_a_chunk) {
  SegmentCursor<DeviceWarp, EmptyChunks> cursor(
      groups, EmptyChunks{groups.local_groups, chunks_of(results)});
  unsigned const start = clock();
  while (true) {
    unsigned number = 0;
    if (DeviceWarp::leads()) number = atomicAdd(taken, 1);
    number = __shfl_sync(~0u, number, 0);
    int const chunk = number * gridDim.x + blockIdx.x;
    Segment segment;
    if (!cursor.seek(chunk, segment)) return;
    while (unsigned(clock()) - start < number * cycles_a_chunk) __nanosleep(50);
    int64_t const matrix = int64_t(segment.batch) * groups.local_groups + segment.local_group;
    int const of_group = chunk - segment.first_unit, chunks = chunks_of_one(results);
    bool const is_second = of_group >= chunks;
    int64_t const first = int64_t(is_second ? of_group - chunks : of_group) * kChunkVectors;
    int const vectors = static_cast<int>(min(int64_t(kChunkVectors), results.vectors - first));
    uint4* const to =
        (is_second ? results.data[1] : results.data[0]) + matrix * results.vectors + first;
    // The stores are streaming, so that operands stay in L2.
#pragma unroll 8
    for (int i = DeviceWarp::lanes(); i < vectors; i += kWarpSize) __stcs(to + i, uint4{});
  }
}

}  // namespace jgg::sm90
