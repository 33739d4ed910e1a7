// The epilogue: converts accumulators to the output type and stores them through shared memory by
// TMA, subtile by subtile. A 16-bit result is packed into half as many registers as its
// accumulators and stored while the next tile's first steps are being multiplied.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "scheduler/warp.h"
#include "sm90/config.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

template <class Config, int kResults = 1>
class CooperativeEpilogue {
  using Output = typename Config::Output;
  // Two columns to a register, or one.
  static constexpr bool kPacks = sizeof(Output) == 2;
  static constexpr int kAccumulators = kRowsPerConsumer * Config::kTileN / kWarpgroup;

 public:
  static_assert(kResults == 1 || kResults == 2);

  __device__ CooperativeEpilogue(SharedStorage<Config>& shared, CUtensorMap const& descriptor,
                                 int consumer, StoreHint hint = StoreHint::kNormal)
      : subtiles_(&shared.subtiles[consumer][0][0]),
        descriptor_(&descriptor),
        hint_(hint),
        consumer_(consumer),
        next_subtile_(Config::kSubtiles),
        end_(Config::kSubtiles) {}

  __device__ CooperativeEpilogue(SharedStorage<Config>& shared,
                                 CUtensorMap const (&descriptors)[kResults], int consumer,
                                 StoreHint hint)
      : CooperativeEpilogue(shared, descriptors[0], consumer, hint) {}

  // Takes over a finished half tile, or its first `kColumns` columns. 32-bit results are too many
  // registers to carry along and are stored at once.
  template <int kColumns = Config::kTileN, class Accumulators>
  __device__ void take(Accumulators const& accumulators, StoreCoordinates at) {
    constexpr int kTaken = kColumns / Config::kSubtileColumns;
    static_assert(kTaken % Config::kSubtileSlots == 0, "subtiles always go to the same slot");
    at_ = at;
    next_subtile_ = 0;
    end_ = kTaken;
    if constexpr (kPacks) {
      cutlass::NumericArrayConverter<Output, float, 2> const convert;
#pragma unroll
      for (int i = 0; i < kRowsPerConsumer * kColumns / kWarpgroup / 2; ++i) {
        auto const pair = convert({accumulators(2 * i), accumulators(2 * i + 1)});
        packed_[i] = reinterpret_cast<uint32_t const&>(pair);
      }
    } else {
#pragma unroll
      for (int subtile = 0; subtile < kTaken; ++subtile) {
        begin_subtile(subtile);
        write_floats(subtile, accumulators);
        end_subtile(subtile);
      }
      next_subtile_ = kTaken;
    }
  }

  // Stores one subtile of what was taken, if any is left.
  __device__ void store_next() {
    if constexpr (kPacks) {
      if (next_subtile_ == end_) return;
      // The registers of a subtile must be known at compile time.
#pragma unroll
      for (int subtile = 0; subtile < Config::kSubtiles; ++subtile) {
        if (subtile == next_subtile_) {
          begin_subtile(subtile);
          write_packed(subtile);
          end_subtile(subtile);
        }
      }
      ++next_subtile_;
    }
  }

  __device__ void store_rest() {
    while (next_subtile_ < end_) store_next();
  }

  // Where the next half tiles to be taken go. Nothing that was taken is left to be stored.
  __device__ void set_target(CUtensorMap const& descriptor) { descriptor_ = &descriptor; }

  // Shared memory must outlive the copies out of it.
  __device__ void wait() const {
    if (issues()) cute::tma_store_wait<0>();
  }

 private:
  __device__ bool issues() const { return threadIdx.x % kWarpgroup == 0; }

  __device__ uint8_t* slot(int subtile) const {
    return subtiles_ + subtile % Config::kSubtileSlots * Config::kSubtileBytes;
  }

  // The slot was last used kSubtileSlots subtiles ago.
  __device__ void begin_subtile(int) const {
    if (issues()) cute::tma_store_wait<Config::kSubtileSlots - 1>();
    sync_consumer(consumer_);
  }

  __device__ void end_subtile(int subtile) const {
    fence_async_proxy();
    sync_consumer(consumer_);
    if (issues()) {
      bool const second = kResults == 2 && is_in_second(at_.outer);
      store_box(descriptor_[second], slot(subtile), at_.column + subtile * Config::kSubtileColumns,
                at_.row, second ? in_second(at_.outer) : at_.outer, hint_);
      cute::tma_store_arrive();
    }
  }

  // WGMMA leaves thread t of a warp with columns 2 (t % 4) and the next of rows t / 4 and t / 4 + 8
  // of each 8 columns: the fragments of stmatrix. One instruction takes 16 rows by 16 columns; lane
  // l gives the address of row l % 16 of its left half if l < 16, of its right half otherwise.
  __device__ void write_packed(int subtile) const {
    int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
    int const row = warp * 16 + lane % 16;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      int const unit = (2 * pair + lane / 16) ^ (row % 8);
      auto& target =
          *reinterpret_cast<cute::uint128_t*>(slot(subtile) + row * kRowBytes + unit * 16);
      uint32_t const* source = packed_ + (subtile * 4 + pair) * 4;
      cute::SM90_U32x4_STSM_N::copy(source[0], source[1], source[2], source[3], target);
    }
  }

  template <class Accumulators>
  __device__ void write_floats(int subtile, Accumulators const& accumulators) const {
    int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
    constexpr int kEights = Config::kSubtileColumns / 8;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = warp * 16 + half * 8 + lane / 4;
        int const unit = (2 * eight + lane % 4 / 2) ^ (row % 8);
        int const i = (subtile * kEights + eight) * 4 + half * 2;
        *reinterpret_cast<float2*>(slot(subtile) + row * kRowBytes + unit * 16 + lane % 2 * 8) =
            float2{accumulators(i), accumulators(i + 1)};
      }
    }
  }

  uint8_t* subtiles_;
  CUtensorMap const* descriptor_;
  StoreHint hint_;
  int consumer_;
  int next_subtile_;  // of the half tile taken last; end_ once all are stored
  int end_;
  StoreCoordinates at_;
  uint32_t packed_[kPacks ? kAccumulators / 2 : 1];
};

}  // namespace jgg::sm90
