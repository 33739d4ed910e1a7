// Everything about a kernel that is known at compile time: tile, warps, stages, shared memory.
#pragma once

#include "fp64/element.h"
#include "types.h"

namespace jgg::fp64 {

inline constexpr int kWarpSize = 32;
// Shared memory of a multiprocessor, and the part of it that the system takes for each block.
inline constexpr int kSharedMemory = 228 * 1024, kSharedMemoryReserved = 1024;

// A block computes square tiles [kTile, kTile] with kWarpsM x kWarpsN warps. An instruction
// multiplies 4 kQuads values of k.
//
// In a cycle, the FP64 tensor cores of a multiprocessor do 128 multiply-adds, and its shared memory
// delivers 128 bytes. For a value of k, a warp that multiplies 64 x 32 loads 96 doubles (6 cycles)
// for 2048 multiply-adds (16 cycles). A warp that multiplies 32 x 32 complex numbers loads 64 of
// them (8 cycles) for 4096 multiply-adds (32 cycles). So loads do not limit the kernels. Neither do
// copies from L2, at 16 bytes a cycle.
template <class Element_, int kTile_, int kWarpsM_, int kWarpsN_, int kQuads_, int kBlocks_>
struct TileShape {
  using Element = Element_;
  static constexpr int kTile = kTile_;
  static constexpr int kWarpsM = kWarpsM_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kQuads = kQuads_;
  static constexpr int kBlocks = kBlocks_;  // resident on a multiprocessor
  static constexpr TileConfig kConfig{kTile, kTile, 1};
};

// Operands are stored [rows, k], or [k, rows] if transposed. They are copied in units of
// kUnitBytes, so the bytes of their contiguous dimension have to be a multiple of kUnitBytes.
template <class Shape, bool kLhsTransposed_, bool kRhsTransposed_, int kUnitBytes_>
struct KernelConfig : Shape {
  using Element = typename Shape::Element;
  using Shape::kBlocks, Shape::kTile, Shape::kWarpsM, Shape::kWarpsN, Shape::kQuads;
  static constexpr bool kLhsTransposed = kLhsTransposed_, kRhsTransposed = kRhsTransposed_;
  static constexpr int kUnitBytes = kUnitBytes_;

  static constexpr int kParts = ValueOf<Element>::kParts;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpSize;
  static constexpr int kWarpRows = kTile / kWarpsM, kWarpColumns = kTile / kWarpsN;

  // A step of the mainloop multiplies kTileK values of k, 128 bytes of a row.
  static constexpr int kStepBytes = 128;
  static constexpr int kTileK = kStepBytes / sizeof(Element);
  static constexpr int kGroups = kTileK / (4 * kQuads);  // instructions that a step takes

  static constexpr int kStages = 3;
  static constexpr int kPanelBytes = kTile * kStepBytes;
  static constexpr int kStageBytes = 2 * kPanelBytes;
  static constexpr int kStagedBytes = kTile * kTile * sizeof(Value<Element>);
  // The loader is up to kStages - 1 steps ahead of the products, and up to kStages - 1 rounds ahead
  // if tiles have one step.
  static constexpr int kTileSlots = 4, kTileSlotBytes = 128;
  static_assert(kTileSlots > kStages);
  // Shared memory has stages, a staged tile, a factor, and the tiles of the rounds in progress.
  static constexpr int kStagedAt = kStages * kStageBytes, kFactorAt = kStagedAt + kStagedBytes;
  static constexpr int kTilesAt = kFactorAt + sizeof(Complex128);
  static constexpr int kSharedBytes = kTilesAt + kTileSlotBytes;

  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 8 == 0, "the shape of an instruction");
  static_assert(kUnitBytes % sizeof(Element) == 0, "an element is copied at once");
  static_assert(kBlocks * (kSharedBytes + kSharedMemoryReserved) <= kSharedMemory);
};

}  // namespace jgg::fp64
