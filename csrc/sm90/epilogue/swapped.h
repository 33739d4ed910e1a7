// Stores the result of a swapped tile through shared memory by TMA.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "sm90/epilogue/pack.h"
#include "sm90/epilogue/subtile.h"
#include "sm90/mainloop/swapped_scaled_config.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

// The epilogue of one consumer, which has 64 columns. Each warp has 16 of them. In every 8 rows,
// thread t of a warp has rows 2 (t % 4) and 2 (t % 4) + 1 of columns t / 4 and t / 4 + 8.
//
// Boxes are 8 rows by 128 bytes. A box of 16-bit results has all columns, a box of 32-bit results
// has half of them.
template <class Config>
class SwappedEpilogue {
 public:
  __device__ SwappedEpilogue(SwappedScaledStorage<Config>& shared, CUtensorMap const& descriptor,
                             ElementType type, int consumer)
      : boxes_(shared.subtiles[consumer]),
        descriptor_(descriptor),
        type_(type),
        consumer_(consumer) {}

  // Stores the first `rows` rows of a tile, at most kRows, each column times its `scale(column)`.
  template <int kRows, int kSums, class Scale>
  __device__ void store(float const (&sums)[kSums], StoreCoordinates at, int rows,
                        Scale scale) const {
    static_assert(kSums == kRows * kColumnsPerConsumer / kWarpgroup);
    int const column = warp() * kWarpColumns + lane() / 4;
    at.column += consumer_ * kColumnsPerConsumer;
    float const scales[2] = {scale(column), scale(column + 8)};
    // Results of 32 bits are stored in two turns, each with half of the tile's rows. A tile of 8
    // rows cannot be halved, so it has only 16-bit results.
    constexpr int kTurn = Config::kTileM / 2;
    if (kTurn >= Config::kBoxRows && type_ == ElementType::kF32) {
#pragma unroll
      for (int first = 0; first < kRows; first += kTurn) {
        if (first > 0 && first >= rows) return;
        constexpr int kMost = kRows < kTurn ? kRows : kTurn;
        through_shared_memory<2, kMost>({at.column, at.row + first, at.outer}, rows - first, [&] {
          write_floats<kMost>(&sums[first * kColumnsPerConsumer / kWarpgroup], scales);
        });
      }
    } else {
      through_shared_memory<1, kRows>(at, rows, [&] { write_halves<kRows>(sums, scales); });
    }
  }

  __device__ void wait() const { wait_for_stores(); }

 private:
  static constexpr int kWarpColumns = 16;

  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int warp() { return threadIdx.x % kWarpgroup / kWarpSize; }

  // Has `write` fill the boxes of kRows rows, `kAcross` of them next to each other, and stores the
  // boxes that have rows.
  template <int kAcross, int kRows, class Write>
  __device__ void through_shared_memory(StoreCoordinates at, int rows, Write write) const {
    acquire_subtile<0>(consumer_);
    write();
    store_subtile(consumer_, [&] {
#pragma unroll
      for (int across = 0; across < kAcross; ++across) {
        for (int row = 0; row < kRows && row < rows; row += Config::kBoxRows) {
          cute::SM90_TMA_STORE_3D::copy(&descriptor_, box<kRows>(across, row / Config::kBoxRows),
                                        at.column + across * kColumnsPerConsumer / kAcross,
                                        at.row + row, at.outer);
        }
      }
    });
  }

  template <int kRows>
  __device__ uint8_t* box(int across, int down) const {
    return boxes_ + (across * (kRows / Config::kBoxRows) + down) * Config::kBoxBytes;
  }

  // Transposes fragments of 8 rows by 8 columns while it writes them. Lane l gives the address of
  // row l % 8 of a fragment, in the left or right half of the warp's columns and in the first or
  // second of two boxes. If there is only one box, the addresses of lanes 16 to 31 are not used.
  template <int kRows>
  __device__ void write_halves(float const* sums, float const (&scales)[2]) const {
    int const row = lane() % 8, unit = warp() * 2 + lane() / 8 % 2;
    uint8_t* const to = swizzled(box<kRows>(0, lane() / 16), row, unit);
#pragma unroll
    for (int down = 0; down < kRows / Config::kBoxRows; down += 2) {
      auto const two = [&](int i) {
        float const* const pair = sums + down * 4 + i * 2;
        return pack(type_, pair[0] * scales[i % 2], pair[1] * scales[i % 2]);
      };
      auto& target = *reinterpret_cast<cute::uint128_t*>(to + down * Config::kBoxBytes);
      if constexpr (kRows == Config::kBoxRows) {
        cute::SM90_U16x4_STSM_T::copy(two(0), two(1), target);
      } else {
        cute::SM90_U16x8_STSM_T::copy(two(0), two(1), two(2), two(3), target);
      }
    }
  }

  // Warps 0 and 1 have the columns of the left boxes.
  template <int kRows>
  __device__ void write_floats(float const* sums, float const (&scales)[2]) const {
#pragma unroll
    for (int i = 0; i < kRows * kColumnsPerConsumer / kWarpgroup; ++i) {
      int const half = i / 2 % 2, row = lane() % 4 * 2 + i % 2;
      int const unit = warp() % 2 * 4 + half * 2 + lane() / 16;
      uint8_t* const to = swizzled(box<kRows>(warp() / 2, i / 4), row, unit);
      reinterpret_cast<float*>(to)[lane() / 4 % 4] = sums[i] * scales[half];
    }
  }

  uint8_t* boxes_;
  CUtensorMap const& descriptor_;
  ElementType type_;
  int consumer_;
};

}  // namespace jgg::sm90
