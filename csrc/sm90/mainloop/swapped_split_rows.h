// How rows come to the tensor cores: a warpgroup reads them from memory, splits them, and leaves
// the parts in shared memory in the layout of WGMMA's N side, rows of 128 bytes whose pieces of 16
// bytes are swizzled. Rows past the end of the group are not written. The old data in their places
// only reaches rows of the result that are not stored.
#pragma once

#include "sm90/epilogue/subtile.h"
#include "sm90/mainloop/swapped_split_config.h"

namespace jgg::sm90 {

// Loads and splits one thread's elements of rows.
//
// WGMMA expects that a thread's four weights are elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the
// 16 elements of K, where t = thread % 4. If weights are contiguous along K, a thread takes
// elements 4 t to 4 t + 3 instead, in one load. Rows are then stored in the same changed order, so
// the sum has the same terms.
template <class Config>
class RowLoader {
 public:
  // `rows` is how many of the tile's rows exist.
  __device__ RowLoader(float const* first_row, int rows, int k)
      : from_(first_row + int64_t(first()) * k + column()), rows_(rows), k_(k) {}

  // One thread's elements of a step.
  struct Step {
    float4 of_row[Config::kTileM * Config::kTileK / 4 / kRowThreads];
  };

  __device__ Step load(int k_tile) const {
    Step step;
    bool const exists = k_tile * Config::kTileK + column() < k_;
    float const* from = from_ + k_tile * Config::kTileK;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      step.of_row[i] = {};
      if (exists && has(i)) {
        step.of_row[i] =
            __ldg(reinterpret_cast<float4 const*>(from + int64_t(i) * kRowsAtOnce * k_));
      }
    }
    return step;
  }

  // Stores the parts of a step in shared memory. WGMMA may read them once all warps have arrived at
  // `rows_full`.
  __device__ void store(Step const& step,
                        uint8_t (&parts)[Config::kParts][Config::kPartBytes]) const {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (!has(i)) break;
      float4 const x = step.of_row[i];
      uint32_t low[Config::kParts], high[Config::kParts];
      split_bfloat16(x.x, x.y, low);
      split_bfloat16(x.z, x.w, high);
      int const row = first() + i * kRowsAtOnce;
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        auto const piece = [&](int number) { return swizzled(parts[part], row, number); };
        if constexpr (Config::kAlongK) {
          // The two halves of a quad go to two pieces.
          int const number = quad() / 4 * 2, byte = quad() % 4 * 4;
          *reinterpret_cast<uint32_t*>(piece(number) + byte) = low[part];
          *reinterpret_cast<uint32_t*>(piece(number + 1) + byte) = high[part];
        } else {
          *reinterpret_cast<uint2*>(piece(quad() / 2) + quad() % 2 * 8) = {low[part], high[part]};
        }
      }
    }
    // WGMMA reads the parts through the async proxy.
    fence_async_proxy();
  }

 private:
  static constexpr int kQuads = Config::kTileK / 4;
  static constexpr int kRowsAtOnce = kRowThreads / kQuads;
  static constexpr int kOwnRows = Config::kTileM / kRowsAtOnce;

  // The place of this thread's elements in a row, and the thread's first row.
  __device__ static int quad() { return threadIdx.x % kQuads; }
  __device__ static int column() { return quad() * 4; }
  __device__ static int first() { return threadIdx.x % kRowThreads / kQuads; }

  __device__ bool has(int i) const { return first() + i * kRowsAtOnce < rows_; }

  float const* from_;
  int rows_;
  int k_;
};

}  // namespace jgg::sm90
