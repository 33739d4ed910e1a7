// The epilogue of FP8 products: converts the sums of a finished tile and stores them through shared
// memory by TMA, while the next tile's first step is being multiplied. It stores a slice at a time,
// which is kMmaN of the tile's columns. The products of the next tile's first step are added to the
// sums only after the sums are stored, so storing this late costs no registers.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/epilogue/pack.h"
#include "sm90/mainloop/scaled_config.h"
#include "sm90/scales/loader.h"
#include "sm90/tma/store.h"
#include "types.h"

namespace jgg::sm90 {

template <class Config>
class ScaledEpilogue {
 public:
  static_assert(Config::kMmaN % 64 == 0, "a slice is whole subtiles");
  static constexpr int kSums = kRowsPerConsumer * Config::kMmaN / kWarpgroup;  // of a slice
  using Slice = float[kSums];
  using Sums = Slice[Config::kSlices];

  __device__ ScaledEpilogue(ScaledStorage<Config>& shared, CUtensorMap const& descriptor,
                            ElementType type, int consumer, StoreHint hint)
      : subtiles_(&shared.subtiles[consumer][0][0]),
        channel_scales_(shared.channel_scales[consumer]),
        row_scales_(shared.row_scales[consumer]),
        descriptor_(&descriptor),
        hint_(hint),
        type_(type),
        consumer_(consumer),
        pending_(false) {}

  __device__ ScaledEpilogue(ScaledStorage<Config>& shared,
                            CUtensorMap const (&descriptors)[Config::kResults], ElementType type,
                            int consumer, StoreHint hint)
      : ScaledEpilogue(shared, descriptors[0], type, consumer, hint) {}

  // Returns the first of a tile's rows that this consumer has.
  __device__ int first_row() const { return consumer_ * kRowsPerConsumer; }

  // Begins to copy the scales of the finished tile's columns, from column `first` on, to shared
  // memory. It is called before `finish`. A tile without products gets scales of zero, because its
  // result is zero whatever the scales are.
  __device__ void fetch_scales(float const* scales, int first, int columns,
                               bool has_products = true) const {
#pragma unroll
    for (int i = 0; i < Config::kTileN; i += kWarpgroup) {
      int const column = min(first + i + thread(), columns - 1);
      ScaleLoader::copy_or_zero(channel_scales_ + i + thread(), scales + column, has_products);
    }
  }

  // Fetches the scales of rows, if they do not change from step to step. `scale(i)` is the address
  // of the scale of row i.
  template <class Scale>
  __device__ void fetch_row_scales(bool has_products, Scale const& scale) const {
    if (thread() < kRowsPerConsumer) {
      ScaleLoader::copy_or_zero(row_scales_ + thread(), scale(thread()), has_products);
    }
  }

  // From this call on, the sums are those of a finished tile, which is stored at `at`.
  __device__ void finish(StoreCoordinates at) {
    at_ = at;
    pending_ = true;
  }

  // Stores a slice of the finished tile, if there is one, and sets its sums to zero.
  __device__ void store(Slice& sums, int slice) {
    if (!pending_) return;
    if (Config::kTransposesOut || type_ != ElementType::kF32) {
      store_subtiles<uint16_t>(sums, slice);
    } else {
      store_subtiles<float>(sums, slice);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    if (slice == Config::kSlices - 1) pending_ = false;
  }

  __device__ void flush(Sums& sums) {
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) store(sums[slice], slice);
  }

  // Shared memory must outlive the copies out of it.
  __device__ void wait() const {
    if (issues()) cute::tma_store_wait<0>();
  }

 private:
  // Returns this thread's number in its warpgroup. The number is read anew each time. Otherwise,
  // addresses that follow from the number would be kept in registers throughout the mainloop, which
  // has no register to spare.
  __device__ static int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index % kWarpgroup;
  }

  __device__ bool issues() const { return threadIdx.x % kWarpgroup == 0; }

  // Fills all slots at a time, because barriers for each subtile would cost more than waiting until
  // all slots are free.
  template <class Element>
  __device__ void store_subtiles(Slice const& sums, int slice) const {
    constexpr int kColumns = kRowBytes / sizeof(Element);
    constexpr int kSubtiles = Config::kMmaN / kColumns;
    static_assert(kSubtiles % Config::kSubtileSlots == 0);
#pragma unroll
    for (int first = 0; first < kSubtiles; first += Config::kSubtileSlots) {
      if (issues()) cute::tma_store_wait<0>();
      if (Config::kChannelScales && first == 0) cute::cp_async_wait<0>();
      sync_consumer(consumer_);
#pragma unroll
      for (int slot = 0; slot < Config::kSubtileSlots; ++slot) {
        write<Element>(&sums[(first + slot) * kColumns / 2],
                       subtiles_ + slot * Config::kSubtileBytes,
                       slice * Config::kMmaN + (first + slot) * kColumns);
      }
      fence_async_proxy();
      sync_consumer(consumer_);
      if (issues()) {
        int const ahead = slice * Config::kMmaN + first * kColumns;
        bool const second = Config::kResults == 2 && is_in_second(at_.outer);
#pragma unroll
        for (int slot = 0; slot < Config::kSubtileSlots; ++slot) {
          int const across = ahead + slot * kColumns;
          store_box(descriptor_[second], subtiles_ + slot * Config::kSubtileBytes,
                    at_.column + (Config::kTransposesOut ? 0 : across),
                    at_.row + (Config::kTransposesOut ? across : 0),
                    second ? in_second(at_.outer) : at_.outer, hint_);
        }
        cute::tma_store_arrive();
      }
    }
  }

  template <class Element>
  __device__ void write(float const* sums, uint8_t* slot, int column) const {
    if constexpr (sizeof(Element) == sizeof(float)) {
      write_floats(sums, slot, column);
    } else if constexpr (Config::kTransposesOut) {
      write_transposed(sums, slot, column);
    } else {
      write_halves(sums, slot, column);
    }
  }

  // The scales of a thread's columns in a subtile that begins at `column`: two neighbours in every
  // eight columns. All are loaded before any result is written. The compiler moves no load past a
  // store to shared memory, so a thread would otherwise wait for each load separately.
  template <int kEights>
  struct ColumnScales {
    float2 of[kEights];

    __device__ ColumnScales(ScaledEpilogue const& epilogue, int column) {
      if constexpr (Config::kChannelScales) {
        int const first = column + thread() % 4 * 2;
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          of[i] = *reinterpret_cast<float2 const*>(epilogue.channel_scales_ + first + i * 8);
        }
      }
    }
  };

  // Returns sums i and i + 1, which are neighbours in a row, times their scales.
  template <int kEights>
  __device__ float2 scaled(float const* sums, int i, ColumnScales<kEights> const& scales) const {
    float2 pair{sums[i], sums[i + 1]};
    if constexpr (Config::kChannelScales) {
      float2 const scale = scales.of[i / 4];
      pair = {pair.x * scale.x, pair.y * scale.y};
    }
    if constexpr (!Config::kStepScales) {
      float const scale = row_scales_[thread() / 32 * 16 + i / 2 % 2 * 8 + thread() % 32 / 4];
      pair = {pair.x * scale, pair.y * scale};
    }
    return pair;
  }

  // After WGMMA, thread t of a warp has, in every 8 columns, columns 2 (t % 4) and 2 (t % 4) + 1 of
  // rows t / 4 and t / 4 + 8. These are the fragments of stmatrix. One instruction stores 16 rows
  // by 16 columns. Lane l gives the address of row l % 16: of the left half if l < 16, and of the
  // right half otherwise.
  __device__ void write_halves(float const* sums, uint8_t* slot, int column) const {
    int const lane = thread() % 32, warp = thread() / 32;
    int const row = warp * 16 + lane % 16;
    ColumnScales<8> const scales(*this, column);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      int const unit = (2 * pair + lane / 16) ^ (row % 8);
      auto& target = *reinterpret_cast<cute::uint128_t*>(slot + row * kRowBytes + unit * 16);
      auto const two = [&](int i) {
        float2 const values = scaled(sums, pair * 8 + i, scales);
        return pack(type_, values.x, values.y);
      };
      cute::SM90_U32x4_STSM_N::copy(two(0), two(2), two(4), two(6), target);
    }
  }

  // Writes the transposed subtile, which has as many rows as columns. A fragment of 8 x 8 becomes
  // eight rows of 16 bytes: lane l gives the address of row l % 8 of fragment l / 8.
  __device__ void write_transposed(float const* sums, uint8_t* slot, int column) const {
    int const lane = thread() % 32, warp = thread() / 32;
    ColumnScales<8> const scales(*this, column);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      int const row = pair * 16 + lane / 16 * 8 + lane % 8;
      int const unit = (2 * warp + lane / 8 % 2) ^ (row % 8);
      auto& target = *reinterpret_cast<cute::uint128_t*>(slot + row * kRowBytes + unit * 16);
      auto const two = [&](int i) {
        float2 const values = scaled(sums, pair * 8 + i, scales);
        return pack(type_, values.x, values.y);
      };
      cute::SM90_U16x8_STSM_T::copy(two(0), two(2), two(4), two(6), target);
    }
  }

  // Stores neighbouring sums one at a time. A store of both would need them in an aligned pair of
  // registers, which puts each sum into the register bank of its product. Adding the product would
  // then read one bank two or three times, and WGMMA leaves only half of the reads. Half of the
  // lanes store the right sum first, so that no store has two lanes in one bank of shared memory.
  __device__ void write_floats(float const* sums, uint8_t* slot, int column) const {
    int const lane = thread() % 32, warp = thread() / 32;
    bool const swap = (lane ^ lane / 4) % 2;
    ColumnScales<4> const scales(*this, column);
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = warp * 16 + half * 8 + lane / 4;
        int const unit = (2 * eight + lane % 4 / 2) ^ (row % 8);
        float* to = reinterpret_cast<float*>(slot + row * kRowBytes + unit * 16 + lane % 2 * 8);
        auto const [left, right] = scaled(sums, eight * 4 + half * 2, scales);
        to[swap] = swap ? right : left;
        to[!swap] = swap ? left : right;
      }
    }
  }

  uint8_t* subtiles_;
  float* channel_scales_;
  float* row_scales_;
  CUtensorMap const* descriptor_;
  StoreHint hint_;
  ElementType type_;
  int consumer_;
  bool pending_;  // the sums hold a finished tile
  StoreCoordinates at_;
};

}  // namespace jgg::sm90
