// The epilogue of a consumer that has a whole tile: it stores the tile through shared memory by
// TMA, chunk by chunk, while the other consumer multiplies.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <type_traits>

#include "sm90/epilogue/cooperative.h"
#include "sm90/tma/store.h"
#include "sm90/turn.h"

namespace jgg::sm90 {

// The consumers have the same slots in turn: the loads of the other one's tile need the rest of
// shared memory more than the stores need slots.
template <class Config>
class PingpongEpilogue {
  static_assert(std::is_same_v<typename Config::Output, float>, "the only results it is used for");
  static constexpr int kHalves = Config::kTileM / kRowsPerConsumer;
  // Values of one thread in one chunk.
  static constexpr int kValues = kRowsPerConsumer * Config::kChunkColumns / kWarpgroup;

 public:
  __device__ PingpongEpilogue(SharedStorage<Config>& shared, CUtensorMap const& descriptor,
                              int consumer, StoreHint hint)
      : chunks_(&shared.chunks[0][0][0]),
        descriptor_(&descriptor),
        hint_(hint),
        consumer_(consumer),
        turn_(kStoreTurn, consumer) {}

  // Stores a tile of which `rows` are inside the result.
  template <class Accumulators>
  __device__ void store(Accumulators const& accumulators, StoreCoordinates at, int rows) const {
    turn_.wait();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half * kRowsPerConsumer < rows) {
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
          int const number = half * Config::kChunks + chunk;
          write(slot(number), [&](int i) { return accumulators(number * kValues + i); });
          fence_async_proxy();
          // Before anyone goes on to the next chunk, its slot must have been read.
          if (issues()) cute::tma_store_wait<Config::kChunkSlots - 2>();
          sync_consumer(consumer_);
          if (issues()) issue(slot(number), at, half, chunk);
        }
      }
    }
    end_turn();
  }

  // Stores a tile of zeros.
  __device__ void store_zeros(StoreCoordinates at, int rows) const {
    turn_.wait();
    write(slot(0), [](int) { return 0.0f; });
    fence_async_proxy();
    sync_consumer(consumer_);
    if (issues()) {
      for (int half = 0; half < kHalves && half * kRowsPerConsumer < rows; ++half) {
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) issue(slot(0), at, half, chunk);
      }
    }
    end_turn();
  }

  // After the last tile.
  __device__ void end() const { turn_.wait(); }

 private:
  __device__ static bool issues() { return threadIdx.x % kWarpgroup == 0; }

  __device__ uint8_t* slot(int number) const {
    return chunks_ + number % Config::kChunkSlots * Config::kChunkBytes;
  }

  // values(i) is the thread's accumulator number i of the chunk. WGMMA leaves thread t of a warp
  // with columns 2 (t % 4) and the next of rows t / 4 and t / 4 + 8 of each 8 columns.
  template <class Values>
  __device__ static void write(uint8_t* chunk, Values const& values) {
    int const lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroup / kWarpSize;
    // Generic addresses would take twice the registers.
    uint32_t const address = cute::cast_smem_ptr_to_uint(chunk);
#pragma unroll
    for (int eight = 0; eight < Config::kChunkColumns / 8; ++eight) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const row = warp * 16 + half * 8 + lane / 4;
        int const unit = (2 * eight + lane % 4 / 2) ^ (row % 8);
        int const i = eight * 4 + half * 2;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address + row * kRowBytes +
                                                              unit * 16 + lane % 2 * 8),
                     "f"(values(i)), "f"(values(i + 1))
                     : "memory");
      }
    }
  }

  __device__ void issue(uint8_t const* from, StoreCoordinates at, int half, int chunk) const {
    store_box(*descriptor_, from, at.column + chunk * Config::kChunkColumns,
              at.row + half * kRowsPerConsumer, at.outer, hint_);
    cute::tma_store_arrive();
  }

  __device__ void end_turn() const {
    if (issues()) cute::tma_store_wait<0>();
    turn_.pass();
  }

  uint8_t* chunks_;
  CUtensorMap const* descriptor_;
  StoreHint hint_;
  int consumer_;
  Turn turn_;
};

}  // namespace jgg::sm90
