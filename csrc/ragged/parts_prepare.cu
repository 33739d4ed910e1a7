#include <algorithm>

#include "parts/terms.h"
#include "parts/vector.h"
#include "ragged/parts_workspace.h"
#include "scheduler/segment_cursor.h"
#include "scheduler/warp.h"

namespace jgg::sm90 {
namespace {

using parts::finite_magnitude, parts::kVector, parts::raise, parts::scale_of, parts::store_parts,
    parts::Vector;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRowsPerWarp = 512;  // rows whose owners a warp finds
constexpr int kNoOwner = -1;
constexpr int64_t kMostBlocks = 16384;  // for one operand

// The dimension of an operand's matrices that is divided among groups. An operand without such a
// dimension has a matrix for each group.
enum class Ragged { kNothing, kRows, kColumns };

// An operand of `outer` matrices [rows, columns].
struct Operand {
  float const* data;
  __half* high;
  __half* low;  // null if there is only one part
  unsigned* maxima;
  int const* owners;
  int owners_stride;  // from matrix to matrix, 0 if all have the same owners
  int const* in_use;  // [outer], read if the operand is not ragged
  int maxima_stride;
  bool shared;  // whether data has one matrix, which all `outer` matrices copy
  int outer;
  int rows;
  int columns;
  Ragged ragged;
};

struct Operands {
  Operand operand[2];
};

// One row of a matrix in memory, the work of a warp.
struct Line {
  float const* from;
  __half* high;
  __half* low;
  int columns;
  unsigned* maxima;   // of the groups of the line's matrix
  int const* owners;  // the group of each column, if columns are ragged
  int owner;          // the group of the whole line, if columns are not ragged
};

// Calls `function` with each line of this warp. Skips lines that no group owns, because nothing
// reads their parts.
template <class Function>
__device__ void for_each_line(Operand const& operand, Function&& function) {
  unsigned const lines = static_cast<unsigned>(operand.outer) * operand.rows;
  for (unsigned i = blockIdx.x * kWarps + threadIdx.x / kWarpSize; i < lines;
       i += gridDim.x * kWarps) {
    int const outer = i / operand.rows, row = i - outer * operand.rows;
    int const* const owners = operand.owners + int64_t(outer) * operand.owners_stride;
    if (operand.ragged == Ragged::kNothing && !operand.in_use[outer]) continue;
    int const owner = operand.ragged == Ragged::kRows ? owners[row] : 0;
    if (owner == kNoOwner) continue;
    int64_t const to = int64_t(i) * operand.columns;
    int64_t const from = operand.shared ? int64_t(row) * operand.columns : to;
    function(Line{operand.data + from, operand.high + to, operand.low ? operand.low + to : nullptr,
                  operand.columns, operand.maxima + int64_t(outer) * operand.maxima_stride, owners,
                  owner});
  }
}

// Returns the column of this lane's first vector of a line.
__device__ int first_column() { return threadIdx.x % kWarpSize * kVector; }
constexpr int kColumnStep = kWarpSize * kVector;

struct OneUnitARow {
  JGG_HOST_DEVICE int operator()(int, int begin, int end) const { return end - begin; }
};

// The matrices of an operand that is not ragged.
struct Matrices {
  int* in_use;  // null if both operands are ragged
  int count;
  int batch_stride;  // 0 unless batches differ both in their matrices and in their groups' rows
};

__device__ void mark_in_use(Matrices const& matrices, Segment const& segment, int local_groups) {
  int const first = segment.batch * matrices.batch_stride + segment.local_group;
  int const end = matrices.batch_stride ? first + 1 : matrices.count;
  for (int i = first; i < end; i += local_groups) matrices.in_use[i] = true;
}

__global__ void __launch_bounds__(kThreads)
    find_owners(__grid_constant__ GroupSizes const groups, int* owners, Matrices matrices) {
  int const lane = threadIdx.x % kWarpSize;
  int const warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  int64_t const first = int64_t(warp) * kRowsPerWarp;
  int64_t const rows = int64_t(groups.batches) * groups.rows;
  if (first >= rows) return;
  int row = static_cast<int>(first);
  int const end = static_cast<int>(min(first + kRowsPerWarp, rows));
  SegmentCursor<DeviceWarp, OneUnitARow> cursor(groups, OneUnitARow{});
  while (row < end) {
    Segment segment;
    cursor.seek(row, segment);
    int const group = segment.local_group;
    bool const owned = group >= 0 && group < groups.local_groups;
    int const segment_end = min(segment.first_unit + segment.extent, end);
    for (int i = row + lane; i < segment_end; i += kWarpSize) {
      owners[i] = owned ? group : kNoOwner;
    }
    if (owned && matrices.in_use && lane == 0) {
      mark_in_use(matrices, segment, groups.local_groups);
    }
    row = segment_end;
  }
}

__device__ void raise_maximum_of_line(Line const& line) {
  unsigned largest = 0;
#pragma unroll 4
  for (int column = first_column(); column < line.columns; column += kColumnStep) {
    Vector const vector(line.from + column);
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = max(largest, finite_magnitude(vector.x[i]));
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % kWarpSize == 0) raise(line.maxima + line.owner, largest);
}

__device__ void raise_maxima_of_columns(Line const& line) {
  for (int column = first_column(); column < line.columns; column += kColumnStep) {
    Vector const vector(line.from + column);
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      int const owner = line.owners[column + i];
      largest = max(largest, finite_magnitude(vector.x[i]));
      if (i + 1 < kVector && line.owners[column + i + 1] == owner) continue;
      if (owner != kNoOwner) raise(line.maxima + owner, largest);
      largest = 0;
    }
  }
}

__global__ void __launch_bounds__(kThreads) find_maxima(__grid_constant__ Operands const operands) {
  Operand const& operand = operands.operand[blockIdx.y];
  for_each_line(operand, [&](Line const& line) {
    if (operand.ragged == Ragged::kColumns) {
      raise_maxima_of_columns(line);
    } else {
      raise_maximum_of_line(line);
    }
  });
}

// Stores the parts of a line. `scale_at(i)` returns the scale of column i.
template <class ScaleAt>
__device__ void split_line(Line const& line, ScaleAt&& scale_at) {
#pragma unroll 2
  for (int column = first_column(); column < line.columns; column += kColumnStep) {
    Vector const vector(line.from + column);
    store_parts(vector, [&](int i) { return scale_at(column + i); }, line.high, line.low, column);
  }
}

__global__ void __launch_bounds__(kThreads)
    split_operands(__grid_constant__ Operands const operands) {
  Operand const& operand = operands.operand[blockIdx.y];
  for_each_line(operand, [&](Line const& line) {
    if (operand.ragged == Ragged::kColumns) {
      split_line(line, [&](int column) {
        // Columns without a group are never multiplied, so their scale does not matter.
        return scale_of(line.maxima[max(line.owners[column], 0)]);
      });
    } else {
      float const scale = scale_of(line.maxima[line.owner]);
      split_line(line, [=](int) { return scale; });
    }
  });
}

Operand describe(RaggedDotArguments const& a, RaggedWorkspace const& workspace,
                 OperandParts const& parts, float const* data, bool data_batched, Ragged ragged,
                 int rows, int columns) {
  auto* const high = static_cast<__half*>(parts.parts);
  bool const is_ragged = ragged != Ragged::kNothing;
  return {data,
          high,
          parts::parts_of(a.accuracy) == 1 ? nullptr : high + parts.part_stride,
          parts.maxima,
          workspace.owners(),
          workspace.owners_batched() ? a.groups.rows : 0,
          workspace.in_use(),
          is_ragged ? a.groups.local_groups : 1,
          is_ragged && !data_batched,
          static_cast<int>(parts.outer),
          rows,
          columns,
          ragged};
}

Operand describe_lhs(RaggedDotArguments const& a, RaggedWorkspace const& workspace) {
  auto const* const data = static_cast<float const*>(a.lhs);
  if (a.transpose_lhs) {
    return describe(a, workspace, workspace.lhs(), data, a.lhs_batched, Ragged::kColumns, a.k,
                    a.groups.rows);
  }
  return describe(a, workspace, workspace.lhs(), data, a.lhs_batched, Ragged::kRows, a.groups.rows,
                  a.k);
}

Operand describe_rhs(RaggedDotArguments const& a, RaggedWorkspace const& workspace) {
  auto const* const data = static_cast<float const*>(a.rhs);
  Ragged const plain = a.contracting ? Ragged::kRows : Ragged::kNothing;
  int const rows = a.contracting ? a.groups.rows : a.k;
  if (a.transpose_rhs) {
    Ragged const ragged = a.contracting ? Ragged::kColumns : Ragged::kNothing;
    return describe(a, workspace, workspace.rhs(), data, a.rhs_batched, ragged, a.n, rows);
  }
  return describe(a, workspace, workspace.rhs(), data, a.rhs_batched, plain, rows, a.n);
}

int64_t count_lines(Operand const& operand) { return int64_t(operand.outer) * operand.rows; }

}  // namespace

cudaError_t prepare(RaggedDotArguments const& a, RaggedWorkspace const& workspace,
                    cudaStream_t stream) {
  cudaError_t const status =
      cudaMemsetAsync(workspace.memory(), 0, workspace.bytes_to_clear(), stream);
  if (status != cudaSuccess) return status;
  GroupSizes groups = a.groups;
  if (!workspace.owners_batched()) groups.batches = 1;
  bool const differ = workspace.owners_batched() && a.rhs_batched;
  Matrices const matrices{workspace.in_use(), static_cast<int>(workspace.rhs().outer),
                          differ ? a.groups.local_groups : 0};
  int64_t const rows_per_block = kWarps * kRowsPerWarp;
  int64_t const rows = int64_t(groups.batches) * groups.rows;
  int const blocks = static_cast<int>((rows + rows_per_block - 1) / rows_per_block);
  find_owners<<<blocks, kThreads, 0, stream>>>(groups, workspace.owners(), matrices);

  Operands const operands{{describe_lhs(a, workspace), describe_rhs(a, workspace)}};
  int64_t const lines =
      std::max(count_lines(operands.operand[0]), count_lines(operands.operand[1]));
  dim3 const grid(static_cast<unsigned>(std::min((lines + kWarps - 1) / kWarps, kMostBlocks)), 2);
  find_maxima<<<grid, kThreads, 0, stream>>>(operands);
  split_operands<<<grid, kThreads, 0, stream>>>(operands);
  return cudaGetLastError();
}

}  // namespace jgg::sm90
