// The host builds TMA descriptors. The descriptors of ragged operands are exact for every group,
// although they are built without knowing any group size, so no descriptor is ever edited on the
// device.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jgg::sm90 {

// The least part of a row that L2 reads when a load misses. Boxes are 128 bytes wide.
using Fetch = CUtensorMapL2promotion;
constexpr Fetch kFetchBox = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
constexpr Fetch kFetchTwoBoxes = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

struct TensorView {
  void const* data;
  CUtensorMapDataType type;
  int element_bytes;
  Fetch fetch = kFetchTwoBoxes;
  int box_bytes = 128;  // of columns: 128, or 64 in mlp/gradient.h
};

// The extent of the shifted row dimension of a ragged descriptor. No group may have more rows.
constexpr int kRaggedRows = 1 << 30;

// A box is as wide as one swizzled row of shared memory: 128 bytes, unless a tensor says otherwise.
// Elements outside an array read as zero and are not written.

// Describes a row-major array [outer, rows, columns]. A box of `box_rows` rows is at {column, row,
// outer}.
cudaError_t encode_plain(CUtensorMap* descriptor, TensorView tensor, int64_t outer, int64_t rows,
                         int64_t columns, int box_rows);

// Describes the array in slabs of 128 bytes of columns. A box of `box_slabs` slabs is at {0, row,
// slab, outer}. `columns` is a multiple of the columns of a slab.
cudaError_t encode_slabs(CUtensorMap* descriptor, TensorView tensor, int64_t outer, int64_t rows,
                         int64_t columns, int box_rows, int box_slabs);

// Describes a row-major array [rows, columns] in boxes of one row. A box is at {column, row}.
cudaError_t encode_rows(CUtensorMap* descriptor, TensorView tensor, int64_t rows, int64_t columns);

// Describes an array [rows, columns] for loads that end with a group. Row r of the group that ends
// before row `end` and has `extent` rows is read at {column, kRaggedRows - extent + r, kRaggedRows,
// end}. Past the extent, the second coordinate leaves its dimension and the hardware fills in
// zeros. Inside the extent, the strides of the second and third dimension add up to 2^64 /
// kRaggedRows, so their offsets cancel modulo 2^64.
cudaError_t encode_ragged_load(CUtensorMap* descriptor, TensorView tensor, int64_t columns,
                               int box_rows);

// Describes a ragged load in slabs. The slab is a fifth coordinate, and the column is 0.
cudaError_t encode_ragged_load_slabs(CUtensorMap* descriptor, TensorView tensor, int64_t columns,
                                     int box_rows, int box_slabs);

// Describes an array [rows, columns] for stores that end with a group. The base address is `shift`
// rows before the array. A store, unlike a load, never touches the rows between the base address
// and the array. Row r is written at {column, shift - extent + r, end}. `shift` is at least the
// number of rows of any group.
cudaError_t encode_ragged_store(CUtensorMap* descriptor, TensorView tensor, int64_t columns,
                                int box_rows, int shift);

}  // namespace jgg::sm90
