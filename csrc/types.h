// Types that all layers share: element types, accuracy, tiles, kinds of kernels, scales. This
// header uses no CUDA.
#pragma once

#include <cstdint>

namespace jgg {

enum class ElementType { kBf16, kF16, kF32, kF64, kC64, kC128, kE4m3, kE5m2 };

// The least accuracy of a product of float32 operands. The 16-bit tensor cores compute such a
// product from parts of the operands. The kernel decides how many parts and products the accuracy
// takes.
enum class Accuracy { kTf32, kF32 };

// How a kernel divides its work.
enum class KernelKind {
  kCooperative,  // the consumers share every tile, each has half of its rows
  kPingpong,     // the consumers take turns, each has every other tile
  kStreamK,      // the last wave of tiles is cut along K
  kSwapped,      // swap-AB, for groups of few rows: rows are on WGMMA's N side
  kFine,         // a thread block for each small tile, for updates of few tiles
};

// The values that identify a compiled kernel. Python's plan chooses them.
struct TileConfig {
  int tile_m;
  int tile_n;
  int cluster;
  KernelKind kind = KernelKind::kCooperative;
};

constexpr bool operator==(TileConfig const& a, TileConfig const& b) {
  return a.tile_m == b.tile_m && a.tile_n == b.tile_n && a.cluster == b.cluster && a.kind == b.kind;
}

// The dimension along which an operand is contiguous: the contracted dimension (kK) or the other
// dimension (kMN).
enum class Major { kK, kMN };

// Returns the major of an operand whose untransposed form has the major `plain`.
constexpr Major major(Major plain, bool transpose) {
  return (plain == Major::kK) != transpose ? Major::kK : Major::kMN;
}

// The treatment of the triangle of a symmetric result that is not computed.
enum class OtherTriangle : int { kKept, kZero, kMirrored };

// The number of elements that share a scale, along each dimension in which elements share scales.
constexpr int kScaleBlock = 128;

// Scales of the rows of an operand. Rows are the dimension that is not contracted. Scale [batch,
// row, block] is at the sum of each index times its stride. A stride is zero if scales do not
// depend on the index that the stride belongs to.
struct RowScales {
  float const* data;
  int64_t batch_stride;
  int row_stride;
  int block_stride;  // a block is kScaleBlock elements of the contracted dimension
};

// Scales of a stack of matrices. A block of kScaleBlock columns by kScaleBlock elements of the
// contracted dimension shares a scale.
struct BlockScales {
  float const* data;
  int64_t batch_stride;
  int64_t group_stride;
  int column_block_stride;
  int block_stride;
};

}  // namespace jgg
