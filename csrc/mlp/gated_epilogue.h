// The epilogue of gate and up: computes hidden = weight * activation(gate) * up, and also stores
// gate and up if they are kept for the backward pass.
//
// A tile has kTileN / 2 columns of gate and the same columns of up, which WGMMA leaves in the same
// thread. Both are rounded and packed when the tile is done. The rest, including the activation, is
// computed subtile by subtile while the next tile is multiplied.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "mlp/activation.h"
#include "scheduler/warp.h"
#include "sm90/config.h"
#include "sm90/consumer.h"
#include "sm90/epilogue/subtile.h"
#include "sm90/tma/store.h"

namespace jgg::mlp {

using sm90::kRowsPerConsumer;
using sm90::kWarpgroup;

// Returns the two 16-bit numbers of a register as float32.
template <class Element>
__device__ float2 unpack(uint32_t pair) {
  cutlass::NumericArrayConverter<float, Element, 2> const convert;
  auto const wide = convert(reinterpret_cast<cutlass::Array<Element, 2> const&>(pair));
  return {wide[0], wide[1]};
}
template <class Element>
__device__ uint32_t pack(float first, float second) {
  cutlass::NumericArrayConverter<Element, float, 2> const convert;
  auto const pair = convert({first, second});
  return reinterpret_cast<uint32_t const&>(pair);
}

template <class Problem>
class GatedEpilogue {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Element = typename Config::Output;
  static_assert(sizeof(Element) == 2 && Config::kTileN == 256 && Config::kSubtileSlots == 2);

  static constexpr int kPacked = kRowsPerConsumer * Config::kTileN / kWarpgroup / 2;
  static constexpr int kPackedASubtile = kPacked / Config::kSubtiles;
  static constexpr bool kHasUp = Problem::kHasUp;
  static constexpr int kHiddenSubtiles = Config::kSubtiles / (kHasUp ? 2 : 1);
  // A unit is what one call of store_next() stores. The units of each subtile of hidden are gate,
  // up (if there is one) and hidden. Hidden has two units, one for each half. Without up there are
  // twice as many subtiles, and hidden has one unit, because for more units the compiler would make
  // a jump table.
  static constexpr int kFirstHidden = kHasUp ? 2 : 1;
  static constexpr int kHiddenParts = kHasUp ? 2 : 1;
  static constexpr int kPairs = 4 / kHiddenParts;  // blocks of 16 columns in a part
  static constexpr int kParts = kFirstHidden + kHiddenParts;
  static constexpr int kUnits = kParts * kHiddenSubtiles;

 public:
  __device__ static bool stores_in(int step, int steps) { return sm90::stores_in(step, steps); }

  __device__ GatedEpilogue(sm90::SharedStorage<Config>& shared, Params const& params, int consumer)
      : subtiles_(&shared.subtiles[consumer][0][0]),
        params_(params),
        consumer_(consumer),
        next_(kUnits) {}

  // Takes a tile. The previous tile has been stored.
  template <class Accumulators>
  __device__ void take(Accumulators const& accumulators, WorkTile const& work) {
    begin(work);
    int const row = work.m + consumer_ * kRowsPerConsumer + sm90::accumulator_row(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool const owned = params_.weights && row + 8 * half < work.extent;
      weight_[half] = owned ? params_.weights[work.begin + row + 8 * half] : 1.0f;
    }
    if constexpr (Problem::kIsGeneral) {
      take_biased(accumulators, work);
    } else {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        packed_[i] = pack<Element>(accumulators(2 * i), accumulators(2 * i + 1));
      }
    }
  }

  // Takes a tile of unowned rows. Their hidden is zero for any weights.
  __device__ void take_zeros(WorkTile const& work) {
    begin(work);
    weight_[0] = weight_[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacked; ++i) packed_[i] = 0;
  }

  __device__ void store_next() {
    if (next_ >= kUnits) return;
    // The registers of a unit must be known at compile time, so `unit` comes from an unrolled loop.
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit == next_) store(unit / kParts, unit % kParts);
    }
    ++next_;
    if (!params_.keeps_gate && next_ % kParts == 0) next_ += kFirstHidden;
  }

  __device__ void store_rest() {
    while (next_ < kUnits) store_next();
  }

  __device__ void wait() const { sm90::wait_for_stores(); }

 private:
  __device__ void begin(WorkTile const& work) {
    at_ = Problem::store_at(params_, work, consumer_ * kRowsPerConsumer);
    next_ = params_.keeps_gate ? 0 : kFirstHidden;
  }

  // Packs the sums with biases. Each packed number has two columns of a row. Two consecutive packed
  // numbers have the same two columns, first of the thread's first row and then of its second row.
  template <class Accumulators>
  __device__ __forceinline__ void take_biased(Accumulators const& accumulators,
                                              WorkTile const& work) {
    int const column = Problem::column_of(work) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kPacked; i += 2) {
      bool const is_up = kHasUp && i >= kPacked / 2;
      int const at = column + (is_up ? i - kPacked / 2 : i) / 2 * 8;
      float2 const bias = bias_at(is_up ? params_.up_bias : params_.gate_bias, work.group, at);
#pragma unroll
      for (int row = i; row < i + 2; ++row) {
        packed_[row] =
            pack<Element>(accumulators(2 * row) + bias.x, accumulators(2 * row + 1) + bias.y);
      }
    }
  }

  // Returns the biases of two columns. Either both columns exist or neither does.
  __device__ float2 bias_at(Bias const& bias, int group, int column) const {
    if (bias.data == nullptr || column >= params_.columns) return {0.0f, 0.0f};
    int64_t const at = int64_t(group) * params_.columns + column;
    if (bias.is_float32) {
      return __ldg(reinterpret_cast<float2 const*>(static_cast<float const*>(bias.data) + at));
    }
    return unpack<Element>(
        __ldg(reinterpret_cast<unsigned const*>(static_cast<Element const*>(bias.data) + at)));
  }

  // Stores `part` of hidden's subtile `j` (see kFirstHidden).
  __device__ __forceinline__ void store(int j, int part) {
    uint32_t const* const gate = packed_ + j * kPackedASubtile;
    uint32_t const* const up = gate + (kHasUp ? kHiddenSubtiles * kPackedASubtile : 0);
    // Stores alternate between the two slots, whether gate, up and hidden are stored or hidden
    // alone.
    int slot = part < kFirstHidden ? (j + part) % 2 : j % 2;
    if (!kHasUp && params_.keeps_gate) slot = part < kFirstHidden ? 0 : 1;
    uint8_t* const subtile = subtiles_ + slot * Config::kSubtileBytes;
    if (part == 0) {
      begin_subtile();
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) write(subtile, pair, gate + 4 * pair);
      end_subtile(params_.gate.out, subtile, j);
    } else if (kHasUp && part == 1) {
      begin_subtile();
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) write(subtile, pair, up + 4 * pair);
      end_subtile(params_.up.out, subtile, j);
    } else {
      if (part == kFirstHidden) begin_subtile();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        int const pair = kPairs * (part - kFirstHidden) + i;
        uint32_t hidden[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          hidden[k] = multiply(gate[4 * pair + k], up[4 * pair + k], weight_[k % 2]);
        }
        write(subtile, pair, hidden);
      }
      if (part == kParts - 1) end_subtile(params_.hidden, subtile, j);
    }
  }

  __device__ uint32_t multiply(uint32_t gate, uint32_t up, float weight) const {
    float2 const g = unpack<Element>(gate), u = unpack<Element>(up);
    Gated const a = gated(params_.activation, g.x, u.x);
    Gated const b = gated(params_.activation, g.y, u.y);
    if constexpr (!kHasUp) return pack<Element>(a.activation * weight, b.activation * weight);
    return pack<Element>(a.activation * a.up * weight, b.activation * b.up * weight);
  }

  __device__ void begin_subtile() const {
    sm90::acquire_subtile<Config::kSubtileSlots - 1>(consumer_);
  }

  __device__ void end_subtile(CUtensorMap const& to, uint8_t const* subtile, int j) const {
    sm90::store_subtile(consumer_, [&] {
      sm90::store_box(to, subtile, at_.column + j * Config::kSubtileColumns, at_.row, at_.outer,
                      sm90::StoreHint::kNormal);
    });
  }

  // Writes 16 columns of a subtile.
  __device__ static void write(uint8_t* subtile, int pair, uint32_t const* source) {
    sm90::write_matrix(sm90::AccumulatorCoordinates().matrix_in(subtile, pair), source);
  }

  uint8_t* subtiles_;
  Params const& params_;
  int consumer_;
  int next_;  // the next unit to store of the tile taken last, or kUnits
  sm90::StoreCoordinates at_;
  float weight_[2];  // of the thread's rows
  uint32_t packed_[kPacked];
};

}  // namespace jgg::mlp
