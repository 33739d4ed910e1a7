// Everything about an FP8 kernel that is fixed at compile time, and the layout of its shared
// memory.
#pragma once

#include <algorithm>

#include "sm90/config.h"
#include "types.h"

namespace jgg::sm90 {

constexpr int kScaledMemoryReserve = 512;  // barriers and the ring of work tiles
constexpr int kScaleThreads = 64;          // the two warps that bring scales

// The scales and accumulation of an FP8 kernel.
struct ScaledForm {
  // Every column of rhs has its own scale in each step. Otherwise blocks of columns share a scale.
  bool column_scales = false;
  // Every column of rhs has one scale in all steps, which the epilogue multiplies by.
  bool channel_scales = false;
  // Scales change from step to step. Otherwise the epilogue multiplies by the scales of rows, too.
  bool step_scales = true;
  // The products of a step are added to float32 sums, not left to the tensor cores' accumulators.
  bool promotes = true;
  // The 16-bit result is stored as its transpose.
  bool transposes_out = false;
  // The number of results of a launch. Each has its own lhs, and all have the same rhs.
  int results = 1;
};

// FP8 tensor cores add up with few mantissa bits. The products of a step therefore go into
// accumulators of their own, and are then scaled and added to float32 sums. Accumulators and sums
// both take registers, so a consumer covers its kTileN columns in slices of kMmaN, one after the
// other through the same accumulators.
template <class Lhs_, class Rhs_, int kTileN_, int kCluster_, ScaledForm kForm>
struct ScaledConfig {
  using Lhs = Lhs_;
  using Rhs = Rhs_;
  static constexpr int kTileM = kConsumers * kRowsPerConsumer;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = kRowBytes;  // a block of scales
  static constexpr int kMmaN = 128;
  static constexpr int kSlices = kTileN / kMmaN;
  static constexpr int kCluster = kCluster_;
  static_assert(kTileK == kScaleBlock && kTileN % kMmaN == 0);

  static constexpr int kLhsBoxRows = kTileM;
  static constexpr int kOutBoxRows = kRowsPerConsumer;

  static constexpr bool kColumnScales = kForm.column_scales;
  static constexpr bool kChannelScales = kForm.channel_scales;
  static constexpr bool kStepScales = kForm.step_scales;
  static constexpr bool kPromotes = kForm.promotes;
  static constexpr bool kTransposesOut = kForm.transposes_out;
  static constexpr int kResults = kForm.results;
  static_assert(!kChannelScales || !kColumnScales);
  static_assert(kStepScales || kChannelScales);
  static_assert(kPromotes || !kStepScales);

  // The number of columns that share a scale wherever the tile starts, unless columns have their
  // own scales.
  static constexpr int kScaleColumns = kTileN % kScaleBlock == 0 ? kScaleBlock : kScaleBlock / 2;
  static constexpr int kRhsScales = kColumnScales ? kTileN : kTileN / kScaleColumns;
  static_assert(kTileN % kScaleColumns == 0);

  static constexpr int kSubtileBytes = kRowsPerConsumer * kRowBytes;
  static constexpr int kSubtileSlots = kStepScales && (kColumnScales || kChannelScales) ? 1 : 2;
  // Scales that the epilogue multiplies by, of a consumer's columns and of its rows.
  static constexpr int kChannels = kChannelScales ? kTileN : 0;
  static constexpr int kRowScales = kStepScales ? 0 : kRowsPerConsumer;

  static constexpr int kLhsBytes = kTileM * kRowBytes;
  static constexpr int kRhsBytes = kTileN * kRowBytes;
  // Scales of one K tile: of rows, and of blocks or columns of rhs.
  static constexpr int kLhsStepScales = kStepScales ? kTileM : 0;
  static constexpr int kRhsStepScales = kStepScales ? kRhsScales : 0;
  static constexpr int kScaleBytes = (kLhsStepScales + kRhsStepScales) * sizeof(float);
  static constexpr int kStages =
      (kSharedMemoryLimit - kScaledMemoryReserve - kConsumers * kSubtileSlots * kSubtileBytes -
       kConsumers * (kChannels + kRowScales) * int(sizeof(float))) /
      (kLhsBytes + kRhsBytes + kScaleBytes);
  static_assert(kStages >= 2, "the tile is too large for shared memory");
};

template <class Config>
struct ScaledStorage {
  alignas(1024) uint8_t lhs[Config::kStages][Config::kLhsBytes];
  alignas(1024) uint8_t rhs[Config::kStages][Config::kRhsBytes];
  alignas(1024) uint8_t subtiles[kConsumers][Config::kSubtileSlots][Config::kSubtileBytes];
  alignas(16) float lhs_scales[Config::kStages][std::max(Config::kLhsStepScales, 1)];
  alignas(16) float rhs_scales[Config::kStages][std::max(Config::kRhsStepScales, 1)];
  alignas(16) float channel_scales[kConsumers][std::max(Config::kChannels, 4)];
  alignas(16) float row_scales[kConsumers][std::max(Config::kRowScales, 4)];
  WorkTile work[kWorkStages];
  alignas(8) Barrier full[Config::kStages];
  alignas(8) Barrier scales_full[Config::kStages];
  alignas(8) Barrier empty[Config::kStages];
  alignas(8) Barrier work_full[kWorkStages];
  alignas(8) Barrier work_empty[kWorkStages];
};

}  // namespace jgg::sm90
