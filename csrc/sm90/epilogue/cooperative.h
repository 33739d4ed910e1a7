// The epilogue of consumers that share a tile: converts accumulators to the output type and stores
// them through shared memory by TMA, subtile by subtile. A 16-bit result is packed into half as
// many registers as its accumulators and stored while the next tile's first steps are being
// multiplied.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "sm90/config.h"
#include "sm90/epilogue/subtile.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

// `kTransposes`: the result is stored as its transpose.
template <class Config, int kResults = 1, bool kTransposes = false>
class CooperativeEpilogue {
  using Output = typename Config::Output;
  using Target = std::conditional_t<kResults == 2, TwoResults, CUtensorMap>;
  // Whether a register holds two columns.
  static constexpr bool kPacks = sizeof(Output) == 2;
  static constexpr int kAccumulators = kRowsPerConsumer * Config::kTileN / kWarpgroup;

 public:
  static_assert(kResults == 1 || kResults == 2);
  static_assert(!kTransposes || (kPacks && kResults == 1), "subtiles have to be squares");

  __device__ CooperativeEpilogue(SharedStorage<Config>& shared, Target const& target, int consumer,
                                 StoreHint hint = StoreHint::kNormal)
      : subtiles_(&shared.subtiles[consumer][0][0]),
        target_(&target),
        hint_(hint),
        consumer_(consumer),
        next_subtile_(Config::kSubtiles),
        end_(Config::kSubtiles) {}

  // Takes over a finished half tile, or its first `kColumns` columns. 32-bit results would take too
  // many registers until the next tile, so they are stored at once.
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
        store(subtile, [&] { write_floats(subtile, accumulators); });
      }
      next_subtile_ = kTaken;
    }
  }

  // Stores one subtile of the half tile that was taken, if any is left.
  __device__ void store_next() {
    if constexpr (kPacks) {
      if (next_subtile_ == end_) return;
      // The registers of a subtile must be known at compile time.
#pragma unroll
      for (int subtile = 0; subtile < Config::kSubtiles; ++subtile) {
        if (subtile == next_subtile_) store(subtile, [&] { write_packed(subtile); });
      }
      ++next_subtile_;
    }
  }

  __device__ void store_rest() {
    while (next_subtile_ < end_) store_next();
  }

  // Sets the destination of the next half tiles. Everything taken before must be stored already.
  __device__ void set_target(Target const& target) { target_ = &target; }

  __device__ void wait() const { wait_for_stores(); }

 private:
  __device__ uint8_t* slot(int subtile) const {
    return subtiles_ + subtile % Config::kSubtileSlots * Config::kSubtileBytes;
  }

  // Waits until the slot of the subtile is free, has `write` fill it, and stores the subtile.
  template <class Write>
  __device__ void store(int subtile, Write const& write) const {
    acquire_subtile<Config::kSubtileSlots - 1>(consumer_);
    write();
    store_subtile(consumer_, [&] {
      int const column = at_.column + subtile * Config::kSubtileColumns;
      if constexpr (kTransposes) {
        store_box(*target_, slot(subtile), at_.row, column, at_.outer, hint_);
      } else if constexpr (kResults == 2) {
        bool const second = column >= target_->second;
        store_box(target_->of[second], slot(subtile), second ? column - target_->second : column,
                  at_.row, at_.outer, hint_);
      } else {
        store_box(*target_, slot(subtile), column, at_.row, at_.outer, hint_);
      }
    });
  }

  __device__ void write_packed(int subtile) const {
    AccumulatorCoordinates const at;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const* const packed = packed_ + (subtile * 4 + i) * 4;
      if constexpr (kTransposes) {
        write_transposed_matrix(at.transposed_matrix_in(slot(subtile), i), packed);
      } else {
        write_matrix(at.matrix_in(slot(subtile), i), packed);
      }
    }
  }

  template <class Accumulators>
  __device__ void write_floats(int subtile, Accumulators const& accumulators) const {
    constexpr int kCount = kRowsPerConsumer * Config::kSubtileColumns / kWarpgroup;
    AccumulatorCoordinates const at;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      int const from = subtile * kCount + i;
      *reinterpret_cast<float2*>(at.pair_in(slot(subtile), i)) =
          float2{accumulators(from), accumulators(from + 1)};
    }
  }

  uint8_t* subtiles_;
  Target const* target_;
  StoreHint hint_;
  int consumer_;
  int next_subtile_;  // of the half tile taken last; end_ once all are stored
  int end_;
  StoreCoordinates at_;
  uint32_t packed_[kPacks ? kAccumulators / 2 : 1];
};

}  // namespace jgg::sm90
