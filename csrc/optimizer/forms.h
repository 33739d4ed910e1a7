// Writes the FP8 forms of blocks to memory. A block's rows have 128 bytes, and memory takes longer
// for them than for rows of 256 bytes. So the thread blocks of a cluster of two by two exchange
// parts of their blocks, and each thread block writes some rows of two blocks.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "quantize/octet.h"
#include "types.h"

namespace jgg::optimizer {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsOfWarp = kScaleBlock / kWarps;
static_assert(kRowsOfWarp == 8);

// The thread blocks of a cluster, one or two along each dimension.
struct ClusterShape {
  int across;
  int down;
};

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

// The rows of one form (plain or transposed) that a thread block writes. They belong to the blocks
// of its cluster, and lie in shared memory in pieces of 8 bytes.
struct Rows {
  static constexpr int kPieces = kScaleBlock / sizeof(uint2);  // of a row of one block
  uint2 piece[kScaleBlock * kPieces];

  // Writes the rows to a matrix of `num_rows` rows and `num_columns` columns, from `first_row` and
  // `first_column` on. Piece p of a row lies at p ^ `swizzle(row)`.
  template <class Swizzle>
  __device__ __forceinline__ void store(uint8_t* matrix, int pitch, int blocks, int first_row,
                                        int num_rows, int first_column, int num_columns,
                                        Swizzle swizzle) const {
    int const pieces = blocks * kPieces, number = threadIdx.x % pieces;
    int const column = first_column + number * static_cast<int>(sizeof(uint2));
    bool const is_aligned = pitch % sizeof(uint2) == 0;
    for (int i = threadIdx.x / pieces; i < kScaleBlock / blocks; i += kThreads / pieces) {
      uint2 const bytes = piece[i * pieces + (number ^ swizzle(i))];
      int const row = first_row + i, count = row < num_rows ? num_columns - column : 0;
      uint8_t* const to = matrix + static_cast<int64_t>(row) * pitch + column;
      if (is_aligned) {
        quantize::store_bytes<true>(to, bytes, count);
      } else {
        quantize::store_bytes<false>(to, bytes, count);
      }
    }
  }
};

struct Forms {
  Rows plain;
  Rows transposed;
};

// The exchange of a cluster, for one of its thread blocks. The constructor begins the exchange, and
// `complete` ends it.
class Exchange {
 public:
  int const across, down;  // the thread block's place in the cluster

  __device__ __forceinline__ Exchange(Forms& forms, ClusterShape shape)
      : Exchange(forms, shape, cooperative_groups::this_cluster().block_rank()) {
    // A thread block may write to the shared memory of another only after the other has begun.
    cooperative_groups::this_cluster().barrier_arrive();
  }

  // Sends this thread's elements, four columns of each of its warp's eight rows, to the thread
  // block that writes these rows.
  __device__ __forceinline__ void put_plain(uint32_t const (&rows)[kRowsOfWarp]) {
    int const rows_of_one = kScaleBlock / shape_.across, warp = threadIdx.x / 32;
    int const row = warp * kRowsOfWarp, pitch = shape_.across * 32;
    auto* const to = reinterpret_cast<uint32_t*>(
                         rows_of(down * shape_.across + row / rows_of_one, &Forms::plain)) +
                     row % rows_of_one * pitch + across * 32 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) to[i * pitch] = rows[i];
  }

  // Sends the same elements transposed. In each of four stores a warp's threads write one piece
  // each, to every fourth row, so that a store uses each bank twice.
  __device__ __forceinline__ void put_transposed(uint32_t const (&rows)[kRowsOfWarp]) {
    uint32_t upper[4] = {rows[0], rows[1], rows[2], rows[3]};
    uint32_t lower[4] = {rows[4], rows[5], rows[6], rows[7]};
    transpose_bytes(upper);
    transpose_bytes(lower);
    int const rows_of_one = kScaleBlock / shape_.down, warp = threadIdx.x / 32;
    int const row = threadIdx.x % 32 * 4, pitch = shape_.down * Rows::kPieces;
    uint2* const to = rows_of(row / rows_of_one * shape_.across + across, &Forms::transposed) +
                      row % rows_of_one * pitch + down * Rows::kPieces + (warp ^ swizzle(row));
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j * pitch] = {upper[j], lower[j]};
  }

  __device__ __forceinline__ void await_begin() {
    cooperative_groups::this_cluster().barrier_wait();
  }
  __device__ __forceinline__ void complete() { cooperative_groups::this_cluster().sync(); }

  // Writes this thread block's rows, after `complete`. `first_row` and `first_column` are those of
  // its block in `matrix` [num_rows, num_columns], whose rows are `pitch` apart.
  __device__ __forceinline__ void store_plain(uint8_t* matrix, int pitch, int first_row,
                                              int num_rows, int first_column,
                                              int num_columns) const {
    forms_.plain.store(matrix, pitch, shape_.across,
                       first_row + across * (kScaleBlock / shape_.across), num_rows,
                       first_column - across * kScaleBlock, num_columns, [](int) { return 0; });
  }
  __device__ __forceinline__ void store_transposed(uint8_t* matrix, int pitch, int first_row,
                                                   int num_rows, int first_column,
                                                   int num_columns) const {
    int const first = down * (kScaleBlock / shape_.down);
    forms_.transposed.store(matrix, pitch, shape_.down, first_row + first, num_rows,
                            first_column - down * kScaleBlock, num_columns,
                            [&](int i) { return swizzle(first + i); });
  }

 private:
  __device__ __forceinline__ Exchange(Forms& forms, ClusterShape shape, int rank)
      : across(rank % shape.across), down(rank / shape.across), forms_(forms), shape_(shape) {}

  __device__ __forceinline__ static int swizzle(int row) { return row / 4 % Rows::kPieces; }

  __device__ __forceinline__ uint2* rows_of(int rank, Rows Forms::* form) const {
    return cooperative_groups::this_cluster().map_shared_rank((forms_.*form).piece, rank);
  }

  Forms& forms_;
  ClusterShape const shape_;
};

}  // namespace jgg::optimizer
