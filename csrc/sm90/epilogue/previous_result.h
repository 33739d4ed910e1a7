// Adds the source C to float32 results (beta = 1). A tile of C is loaded into the stages that
// follow the tile's last K tile. C then arrives by the time that the product is complete, and many
// loads are in flight.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/config.h"
#include "sm90/epilogue/subtile.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

template <class Config>
class PreviousResult {
  using Shared = SharedStorage<Config>;
  using Stage = StageIterator<Config::kStages>;

  // A box is as large as a subtile of the result: 64 rows by 128 bytes. For each 128 bytes of
  // columns, the box of the upper rows comes first, then that of the lower rows.
  static constexpr int kHalves = Config::kTileM / kRowsPerConsumer;
  static constexpr int kBoxes = kHalves * Config::kSubtiles;
  static constexpr int kLhsBoxes = Config::kLhsBytes / Config::kSubtileBytes;
  static constexpr int kRhsBoxes = Config::kRhsBytes / Config::kSubtileBytes;
  static constexpr int kBoxesAStage = kLhsBoxes + kRhsBoxes;

 public:
  static constexpr int kStages = (kBoxes + kBoxesAStage - 1) / kBoxesAStage;
  static_assert(kStages <= Config::kStages && !Config::kTakesTurns);

  // Loads a tile of C, in the producer. `at` is the place of the tile's first element in `result`.
  __device__ static void load(CUtensorMap const& result, StoreCoordinates at, Shared& shared,
                              Stage& stage) {
    constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
#pragma unroll 1
    for (int first = 0; first < kBoxes; first += kBoxesAStage, ++stage) {
      int const boxes = kBoxes - first < kBoxesAStage ? kBoxes - first : kBoxesAStage;
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      Barrier& full = shared.full[stage.stage];
      full.arrive_and_expect_tx(boxes * Config::kSubtileBytes);
#pragma unroll 1
      for (int i = 0; i < boxes; ++i) {
        int const column = (first + i) / kHalves * Config::kSubtileColumns;
        int const row = (first + i) % kHalves * kRowsPerConsumer;
        cute::SM90_TMA_LOAD_3D::copy(&result, full.address(), kHint, box(shared, stage.stage, i),
                                     at.column + column, at.row + row, at.outer);
      }
    }
  }

  // accumulators += this consumer's half of C.
  template <class Mainloop, class Accumulators>
  __device__ static void add(Shared& shared, Stage& stage, int consumer,
                             Accumulators& accumulators) {
    static_assert(kHalves == kConsumers && kBoxesAStage % kHalves == 0);
#pragma unroll
    for (int first = 0; first < kBoxes; first += kBoxesAStage, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
#pragma unroll
      for (int i = 0; i < kBoxesAStage; i += kHalves) {
        if (first + i < kBoxes) {
          add_box(accumulators, (first + i) / kHalves, box(shared, stage.stage, i + consumer));
        }
      }
      release<Mainloop>(shared, stage.stage, consumer);
    }
  }

  // Passes over the stages of a tile in which this consumer has no rows.
  template <class Mainloop>
  __device__ static void skip(Shared& shared, Stage& stage) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
      Mainloop::release(shared, stage.stage);
    }
  }

 private:
  __device__ static uint8_t* box(Shared& shared, int stage, int i) {
    return i < kLhsBoxes ? reinterpret_cast<uint8_t*>(shared.lhs[stage]) + i * Config::kSubtileBytes
                         : reinterpret_cast<uint8_t*>(shared.rhs[stage]) +
                               (i - kLhsBoxes) * Config::kSubtileBytes;
  }

  // Adds the box at `from` to the accumulators of subtile number `number`.
  template <class Accumulators>
  __device__ static void add_box(Accumulators& accumulators, int number, uint8_t const* from) {
    constexpr int kCount = kRowsPerConsumer * Config::kSubtileColumns / kWarpgroup;
    AccumulatorCoordinates const at;
    // Generic addresses would take twice the registers.
    uint32_t const address = cute::cast_smem_ptr_to_uint(from);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      float left, right;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(left), "=f"(right)
                   : "r"(at.pair_in(address, i))
                   : "memory");
      accumulators(number * kCount + i) += left;
      accumulators(number * kCount + i + 1) += right;
    }
  }

  // Releases a stage once all threads of the consumer have read it, so that no later load
  // overwrites what a thread still reads.
  template <class Mainloop>
  __device__ static void release(Shared& shared, int stage, int consumer) {
    fence_async_proxy();
    sync_consumer(consumer);
    Mainloop::release(shared, stage);
  }
};

}  // namespace jgg::sm90
