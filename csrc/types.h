// Types that all layers share: element types, accuracy, tiles, kinds of kernels, scales. No CUDA
// here.
#pragma once

#include <cstdint>

namespace jgg {

enum class ElementType { kBf16, kF16, kF32, kF64, kC64, kC128, kE4m3, kE5m2 };

// The least accuracy of a product of float32 operands. 16-bit tensor cores compute it from parts of
// the operands; how many parts and products that takes is the kernel's business.
enum class Accuracy { kTf32, kF32 };

// How a kernel divides its work.
enum class KernelKind {
  kCooperative,  // the consumers share every tile, each has half of its rows
  kPingpong,     // the consumers take turns, each has every other tile
  kStreamK,      // the last wave of tiles is cut along K
  kSwapped,      // rows are on WGMMA's N side, which comes in 8: for groups of few rows
  kFine,         // a block for each tile: for updates of too few tiles to fill the device
};

// The name of a compiled kernel: what Python's plan chooses by.
struct TileConfig {
  int tile_m;
  int tile_n;
  int cluster;
  KernelKind kind = KernelKind::kCooperative;
};

constexpr bool operator==(TileConfig const& a, TileConfig const& b) {
  return a.tile_m == b.tile_m && a.tile_n == b.tile_n && a.cluster == b.cluster && a.kind == b.kind;
}

// Along which dimension an operand is contiguous: the contracted one, or its other one.
enum class Major { kK, kMN };

// The dimension along which an operand is contiguous, if its plain form has the major `plain`.
constexpr Major major(Major plain, bool transpose) {
  return (plain == Major::kK) != transpose ? Major::kK : Major::kMN;
}

// The treatment of the triangle of a symmetric result that is not computed.
enum class OtherTriangle : int { kKept, kZero, kMirrored };

// Elements that share a scale, along each dimension that shares it.
constexpr int kScaleBlock = 128;

// Scales of the kept dimension of an operand: element [batch, row, block] is at the sum of each
// index times its stride. Coarser scales have a stride of zero.
struct RowScales {
  float const* data;
  int64_t batch_stride;
  int row_stride;
  int block_stride;  // a block is kScaleBlock elements of the contracted dimension
};

// Scales of a stack of matrices in blocks of kScaleBlock columns by kScaleBlock of the contracted
// dimension.
struct BlockScales {
  float const* data;
  int64_t batch_stride;
  int64_t group_stride;
  int column_block_stride;
  int block_stride;
};

}  // namespace jgg
