// The epilogue of a consumer that has a whole tile: it stores the tile through shared memory by
// TMA, subtile by subtile, while the other consumer multiplies.
#pragma once

#include <type_traits>

#include "sm90/epilogue/subtile.h"
#include "sm90/order_barrier.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

// The consumers use the same slots in turn, because stages for loads need the shared memory more
// than stores need slots.
template <class Config>
class PingpongEpilogue {
  static_assert(std::is_same_v<typename Config::Output, float>,
                "only float32 results take this epilogue");
  static constexpr int kHalves = Config::kTileM / kRowsPerConsumer;
  // Values of one thread in one subtile.
  static constexpr int kValues = kRowsPerConsumer * Config::kSubtileColumns / kWarpgroup;

 public:
  __device__ PingpongEpilogue(SharedStorage<Config>& shared, CUtensorMap const& descriptor,
                              int consumer, StoreHint hint)
      : subtiles_(&shared.subtiles[0][0][0]),
        descriptor_(&descriptor),
        hint_(hint),
        consumer_(consumer),
        order_(kStoreOrder, consumer) {}

  // Stores a tile of which `rows` are inside the result.
  template <class Accumulators>
  __device__ void store(Accumulators const& accumulators, StoreCoordinates at, int rows) const {
    order_.wait();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half * kRowsPerConsumer < rows) {
#pragma unroll
        for (int subtile = 0; subtile < Config::kSubtiles; ++subtile) {
          int const number = half * Config::kSubtiles + subtile;
          write(slot(number), [&](int i) { return accumulators(number * kValues + i); });
          fence_async_proxy();
          // TMA must have read the slot of the next subtile before any thread goes on to write it.
          if (issues_stores()) cute::tma_store_wait<Config::kSubtileSlots - 2>();
          sync_consumer(consumer_);
          if (issues_stores()) issue(slot(number), at, half, subtile);
        }
      }
    }
    end_turn();
  }

  // Stores a tile of zeros.
  __device__ void store_zeros(StoreCoordinates at, int rows) const {
    order_.wait();
    write(slot(0), [](int) { return 0.0f; });
    fence_async_proxy();
    sync_consumer(consumer_);
    if (issues_stores()) {
      for (int half = 0; half < kHalves && half * kRowsPerConsumer < rows; ++half) {
        for (int subtile = 0; subtile < Config::kSubtiles; ++subtile)
          issue(slot(0), at, half, subtile);
      }
    }
    end_turn();
  }

  // Waits for the turn after the last tile, so that no arrival is left over (order_barrier.h).
  __device__ void end() const { order_.wait(); }

 private:
  __device__ uint8_t* slot(int number) const {
    return subtiles_ + number % Config::kSubtileSlots * Config::kSubtileBytes;
  }

  // values(i) is the thread's accumulator number i of the subtile.
  template <class Values>
  __device__ static void write(uint8_t* subtile, Values const& values) {
    AccumulatorCoordinates const at;
    // Generic addresses would take twice the registers.
    uint32_t const address = cute::cast_smem_ptr_to_uint(subtile);
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at.pair_in(address, i)), "f"(values(i)),
                   "f"(values(i + 1))
                   : "memory");
    }
  }

  __device__ void issue(uint8_t const* from, StoreCoordinates at, int half, int subtile) const {
    store_box(*descriptor_, from, at.column + subtile * Config::kSubtileColumns,
              at.row + half * kRowsPerConsumer, at.outer, hint_);
    cute::tma_store_arrive();
  }

  __device__ void end_turn() const {
    wait_for_stores();
    order_.pass();
  }

  uint8_t* subtiles_;
  CUtensorMap const* descriptor_;
  StoreHint hint_;
  int consumer_;
  OrderBarrier order_;
};

}  // namespace jgg::sm90
