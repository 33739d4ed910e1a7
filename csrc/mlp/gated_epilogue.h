// The epilogue of gate and up: hidden = weight * activation(gate) * up, and both of them if they
// are kept for the backward pass.
//
// A tile has kTileN / 2 columns of gate and the same columns of up, which WGMMA leaves in the same
// thread. They are rounded and packed when the tile is done. All else, the activation too, happens
// chunk by chunk while the next tile is multiplied.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "mlp/activation.h"
#include "scheduler/warp.h"
#include "sm90/epilogue.h"
#include "sm90/kernel.h"
#include "sm90/kernel_config.h"
#include "sm90/scale_and_add.h"
#include "sm90/tma_store.h"

namespace jgg::mlp {

using sm90::kRowsPerConsumer;
using sm90::kWarpgroup;

// Two 16-bit numbers of a register.
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
  static_assert(sizeof(Element) == 2 && Config::kTileN == 256 && Config::kChunkSlots == 2);

  static constexpr int kPacked = kRowsPerConsumer * Config::kTileN / kWarpgroup / 2;
  static constexpr int kPackedAChunk = kPacked / Config::kChunks;
  static constexpr int kHiddenChunks = Config::kChunks / 2;
  // Of each chunk of hidden: gate, up, and hidden in two halves.
  static constexpr int kUnits = 4 * kHiddenChunks;
  static constexpr int kFirstHidden = 2;

 public:
  __device__ static bool stores_in(int step, int steps) { return sm90::stores_in(step, steps); }

  __device__ GatedEpilogue(sm90::SharedStorage<Config>& shared, Params const& params, int consumer)
      : chunks_(&shared.chunks[consumer][0][0]),
        params_(params),
        consumer_(consumer),
        next_(kUnits) {}

  // Nothing that was taken before is left to be stored.
  template <class Accumulators>
  __device__ void take(Accumulators const& accumulators, WorkTile const& work) {
    begin(work);
    int const row = work.m + consumer_ * kRowsPerConsumer + sm90::accumulator_row(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool const owned = params_.weights && row + 8 * half < work.extent;
      weight_[half] = owned ? params_.weights[work.begin + row + 8 * half] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      packed_[i] = pack<Element>(accumulators(2 * i), accumulators(2 * i + 1));
    }
  }

  // Rows that no local group owns. Whatever their weights are, hidden is zero.
  __device__ void take_zeros(WorkTile const& work) {
    begin(work);
    weight_[0] = weight_[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacked; ++i) packed_[i] = 0;
  }

  __device__ void store_next() {
    if (next_ >= kUnits) return;
    // Registers must be known at compile time.
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit == next_) store(unit / 4, unit % 4);
    }
    ++next_;
    if (!params_.keeps_gate && next_ % 4 == 0) next_ += kFirstHidden;
  }

  __device__ void store_rest() {
    while (next_ < kUnits) store_next();
  }

  __device__ void wait() const {
    if (issues()) cute::tma_store_wait<0>();
  }

 private:
  __device__ void begin(WorkTile const& work) {
    at_ = Problem::store_at(params_, work, consumer_ * kRowsPerConsumer);
    next_ = params_.keeps_gate ? 0 : kFirstHidden;
  }

  __device__ bool issues() const { return threadIdx.x % kWarpgroup == 0; }

  // `part` of hidden's chunk `j`, see kUnits.
  __device__ __forceinline__ void store(int j, int part) {
    uint32_t const* const gate = packed_ + j * kPackedAChunk;
    uint32_t const* const up = gate + kHiddenChunks * kPackedAChunk;
    // Gate, up, hidden take the two slots in turn, and so does hidden alone.
    int const slot = part < kFirstHidden ? (j + part) % 2 : j % 2;
    uint8_t* const chunk = chunks_ + slot * Config::kChunkBytes;
    if (part == 0) {
      begin_chunk();
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) write(chunk, pair, gate + 4 * pair);
      end_chunk(params_.gate.out, chunk, j);
    } else if (part == 1) {
      begin_chunk();
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) write(chunk, pair, up + 4 * pair);
      end_chunk(params_.up.out, chunk, j);
    } else {
      if (part == kFirstHidden) begin_chunk();
#pragma unroll
      for (int pair = 2 * (part - kFirstHidden); pair < 2 * (part - kFirstHidden) + 2; ++pair) {
        uint32_t hidden[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          hidden[i] = multiply(gate[4 * pair + i], up[4 * pair + i], weight_[i % 2]);
        }
        write(chunk, pair, hidden);
      }
      if (part != kFirstHidden) end_chunk(params_.hidden, chunk, j);
    }
  }

  __device__ uint32_t multiply(uint32_t gate, uint32_t up, float weight) const {
    float2 const g = unpack<Element>(gate), u = unpack<Element>(up);
    Gated const a = gated(params_.activation, g.x, u.x);
    Gated const b = gated(params_.activation, g.y, u.y);
    return pack<Element>(a.activation * a.up * weight, b.activation * b.up * weight);
  }

  __device__ void begin_chunk() const {
    if (issues()) cute::tma_store_wait<Config::kChunkSlots - 1>();
    sm90::sync_warpgroup(1 + consumer_);
  }

  __device__ void end_chunk(CUtensorMap const& to, uint8_t const* chunk, int j) const {
    cute::tma_store_fence();
    sm90::sync_warpgroup(1 + consumer_);
    if (issues()) {
      sm90::store_box(to, chunk, at_.column + j * Config::kChunkColumns, at_.row, at_.outer,
                      sm90::StoreHint::kNormal);
      cute::tma_store_arrive();
    }
  }

  // 16 columns of a chunk: one stmatrix takes 16 rows by 16 columns of each warp.
  __device__ static void write(uint8_t* chunk, int pair, uint32_t const* source) {
    int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
    int const row = warp * 16 + lane % 16;
    int const unit = (2 * pair + lane / 16) ^ (row % 8);
    auto& target = *reinterpret_cast<cute::uint128_t*>(chunk + row * sm90::kRowBytes + unit * 16);
    cute::SM90_U32x4_STSM_N::copy(source[0], source[1], source[2], source[3], target);
  }

  uint8_t* chunks_;
  Params const& params_;
  int consumer_;
  int next_;  // unit of the half tile taken last; kUnits once all are stored
  sm90::StoreCoordinates at_;
  float weight_[2];  // of the thread's rows
  uint32_t packed_[kPacked];
};

}  // namespace jgg::mlp
