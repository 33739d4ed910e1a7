// An epilogue that need not hurry, because another warpgroup multiplies meanwhile: each warp turns
// its accumulators into whole rows in shared memory and stores those, without waiting for anyone.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90.hpp>

#include "scheduler/warp.h"
#include "sm90/kernel_config.h"

namespace jgg::sm90 {

// Where a tile goes: its element (0, 0) in an array of `pitch` elements a row, and the part of the
// tile that is stored, its first `columns` of rows [first, last).
template <class Output>
struct TileTarget {
  Output* data;
  int pitch;
  int columns;
  int first;
  int last;
};

template <class Config>
class DirectEpilogue {
  using Output = typename Config::Output;
  using Vector = uint4;
  static constexpr int kVectorColumns = sizeof(Vector) / sizeof(Output);
  static constexpr int kRowVectors = kRowBytes / sizeof(Vector);
  // Of one thread, in one chunk.
  static constexpr int kValues = kWarpRows * Config::kChunkColumns / kWarpSize;
  // Vectors of a thread under way at a time. More of float32 would spill.
  static constexpr int kUnroll = sizeof(Output) == 2 ? 4 : 1;
  // How many rows of a chunk a warp stores with one instruction.
  static constexpr int kRowsAtOnce = kWarpSize / kRowVectors;

 public:
  __device__ DirectEpilogue(SharedStorage<Config>& shared, int consumer)
      : chunk_(shared.chunks[consumer][threadIdx.x % kWarpgroup / kWarpSize]) {}

  // Rows are multiples of 16 bytes, so a vector is inside the array or outside, never in between.
  template <class Accumulators>
  __device__ void store(Accumulators const& accumulators, TileTarget<Output> const& to) const {
    int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
    int const column = lane % kRowVectors * kVectorColumns;
#pragma unroll
    for (int half = 0; half < cute::size<1>(accumulators); ++half) {
      int const first_row = half * kRowsPerConsumer + warp * kWarpRows;
      if (first_row >= to.last) return;
      int const row = first_row + lane / kRowVectors;
      Output* const data = to.data + int64_t(row) * to.pitch + column;
#pragma unroll
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        __syncwarp();
        write(accumulators, (half * Config::kChunks + chunk) * kValues);
        __syncwarp();
#pragma unroll kUnroll
        for (int i = 0; i < kWarpRows; i += kRowsAtOnce) {
          bool const inside = row + i >= to.first && row + i < to.last &&
                              chunk * Config::kChunkColumns < to.columns - column;
          if (inside) {
            *reinterpret_cast<Vector*>(data + int64_t(i) * to.pitch +
                                       chunk * Config::kChunkColumns) =
                vector(i + lane / kRowVectors, lane % kRowVectors);
          }
        }
      }
    }
  }

  __device__ void store_zeros(TileTarget<Output> const& to) const {
    int const thread = threadIdx.x % kWarpgroup;
    int const column = thread % kRowVectors * kVectorColumns;
    for (int row = to.first + thread / kRowVectors; row < min(to.last, Config::kTileM);
         row += kWarpgroup / kRowVectors) {
      Output* const data = to.data + int64_t(row) * to.pitch;
      for (int i = column; i < min(to.columns, Config::kTileN); i += Config::kChunkColumns) {
        *reinterpret_cast<Vector*>(data + i) = Vector{0, 0, 0, 0};
      }
    }
  }

 private:
  // Rows of 128 bytes, permuted in units of 16, so that neither stmatrix nor reading rows meets the
  // same bank twice.
  __device__ Vector& vector(int row, int unit) const {
    return reinterpret_cast<Vector*>(chunk_)[row * kRowVectors + (unit ^ row % 8)];
  }

  // Writes the warp's 16 rows of a chunk, beginning with accumulator `first`. WGMMA leaves thread t
  // of a warp with columns 2 (t % 4) and the next of rows t / 4 and t / 4 + 8 of each 8 columns.
  template <class Accumulators>
  __device__ void write(Accumulators const& accumulators, int first) const {
    int const lane = threadIdx.x % kWarpSize;
    if constexpr (sizeof(Output) == 2) {
      // Those are the fragments of stmatrix. One instruction takes 16 rows by 16 columns; lane l
      // gives the address of row l % 16 of its left half if l < 16, of its right half otherwise.
      cutlass::NumericArrayConverter<Output, float, 2> const convert;
#pragma unroll
      for (int pair = 0; pair < kValues / 8; ++pair) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const value = first + pair * 8 + 2 * i;
          auto const two = convert({accumulators(value), accumulators(value + 1)});
          packed[i] = reinterpret_cast<uint32_t const&>(two);
        }
        auto& target = reinterpret_cast<cute::uint128_t&>(vector(lane % 16, 2 * pair + lane / 16));
        cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3], target);
      }
    } else {
#pragma unroll
      for (int eight = 0; eight < kValues / 4; ++eight) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const value = first + eight * 4 + half * 2;
          auto* const unit =
              reinterpret_cast<float2*>(&vector(half * 8 + lane / 4, 2 * eight + lane % 4 / 2));
          unit[lane % 2] = float2{accumulators(value), accumulators(value + 1)};
        }
      }
    }
  }

  uint8_t* chunk_;
};

}  // namespace jgg::sm90
