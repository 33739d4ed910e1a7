// The layout of partial sums in the workspace of a launch.
#pragma once

#include <cstdint>

namespace jgg {

// There is a slot for each consumer of each thread block. A slot has half a tile in float32, in the
// order in which the consumer's threads hold it, and an announcement, which says that the half tile
// is there.
struct PartialSumsWorkspace {
  float* sums;              // [slots, slot_floats]
  uint32_t* announcements;  // [slots]
  int64_t slot_floats;
  int64_t slots;

  PartialSumsWorkspace() = default;

  // Makes as many slots as fit into `bytes`.
  PartialSumsWorkspace(void* memory, int64_t bytes, int64_t slot_floats)
      : sums(static_cast<float*>(memory)),
        slot_floats(slot_floats),
        slots(bytes / slot_bytes(slot_floats)) {
    announcements = reinterpret_cast<uint32_t*>(sums + slots * slot_floats);
  }

  // Returns the bytes of the slot of one consumer.
  static int64_t slot_bytes(int64_t slot_floats) {
    return slot_floats * sizeof(float) + sizeof(uint32_t);
  }

  // Returns the bytes of the slots of one thread block.
  static int64_t block_bytes(int tile_m, int tile_n) {
    constexpr int kConsumers = 2;
    return kConsumers * slot_bytes(int64_t(tile_m) * tile_n / kConsumers);
  }
};

}  // namespace jgg
