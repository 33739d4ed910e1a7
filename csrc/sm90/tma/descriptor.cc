#include "sm90/tma/descriptor.h"

#include <cudaTypedefs.h>

#include <initializer_list>

namespace jgg::sm90 {
namespace {

// Fetches the function from the CUDA driver at run time, so that nothing here links against the
// driver and the extension can be imported on a machine without a driver.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static PFN_cuTensorMapEncodeTiled_v12000 const function = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t const status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) symbol = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(symbol);
  }();
  return function;
}

constexpr int kMaxRank = 5;

// No array has as many rows or groups.
constexpr cuuint64_t kUnbounded = 0x7fff0000;

// The sum of the strides of the two shifted dimensions of a ragged load.
constexpr cuuint64_t kWrap = ~cuuint64_t(0) / kRaggedRows + 1;

struct Dimension {
  cuuint64_t extent;
  cuuint64_t stride;  // in bytes; the first dimension is contiguous and has none
  int box = 1;
};

cudaError_t encode(CUtensorMap* descriptor, TensorView tensor, uintptr_t base,
                   std::initializer_list<Dimension> dimensions) {
  auto const function = encode_function();
  if (!function) return cudaErrorNotSupported;
  cuuint64_t extents[kMaxRank], strides[kMaxRank];
  cuuint32_t box[kMaxRank], element_strides[kMaxRank];
  int rank = 0;
  for (Dimension const& dimension : dimensions) {
    extents[rank] = dimension.extent;
    if (rank > 0) strides[rank - 1] = dimension.stride;
    box[rank] = dimension.box;
    element_strides[rank] = 1;
    ++rank;
  }
  CUresult const status =
      function(descriptor, tensor.type, rank, reinterpret_cast<void*>(base), extents, strides, box,
               element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
               tensor.box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
               tensor.fetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Sizes in the units of the descriptors.
struct Shape {
  Shape(TensorView tensor, int64_t columns)
      : base(reinterpret_cast<uintptr_t>(tensor.data)),
        columns(columns),
        pitch(columns * tensor.element_bytes),
        box(tensor.box_bytes / tensor.element_bytes),
        slabs(columns / box) {}

  uintptr_t base;
  cuuint64_t columns;
  cuuint64_t pitch;
  int box;
  cuuint64_t slabs;
};

}  // namespace

cudaError_t encode_plain(CUtensorMap* descriptor, TensorView tensor, int64_t outer, int64_t rows,
                         int64_t columns, int box_rows) {
  Shape const shape(tensor, columns);
  return encode(descriptor, tensor, shape.base,
                {{shape.columns, 0, shape.box},
                 {cuuint64_t(rows), shape.pitch, box_rows},
                 {cuuint64_t(outer), shape.pitch * rows}});
}

cudaError_t encode_slabs(CUtensorMap* descriptor, TensorView tensor, int64_t outer, int64_t rows,
                         int64_t columns, int box_rows, int box_slabs) {
  Shape const shape(tensor, columns);
  return encode(descriptor, tensor, shape.base,
                {{cuuint64_t(shape.box), 0, shape.box},
                 {cuuint64_t(rows), shape.pitch, box_rows},
                 {shape.slabs, cuuint64_t(tensor.box_bytes), box_slabs},
                 {cuuint64_t(outer), shape.pitch * rows}});
}

cudaError_t encode_rows(CUtensorMap* descriptor, TensorView tensor, int64_t rows, int64_t columns) {
  Shape const shape(tensor, columns);
  return encode(descriptor, tensor, shape.base,
                {{shape.columns, 0, shape.box}, {cuuint64_t(rows), shape.pitch, 1}});
}

cudaError_t encode_ragged_load(CUtensorMap* descriptor, TensorView tensor, int64_t columns,
                               int box_rows) {
  Shape const shape(tensor, columns);
  return encode(descriptor, tensor, shape.base,
                {{shape.columns, 0, shape.box},
                 {kRaggedRows, shape.pitch, box_rows},
                 {kUnbounded, kWrap - shape.pitch},
                 {kUnbounded, shape.pitch}});
}

cudaError_t encode_ragged_load_slabs(CUtensorMap* descriptor, TensorView tensor, int64_t columns,
                                     int box_rows, int box_slabs) {
  Shape const shape(tensor, columns);
  return encode(descriptor, tensor, shape.base,
                {{cuuint64_t(shape.box), 0, shape.box},
                 {kRaggedRows, shape.pitch, box_rows},
                 {kUnbounded, kWrap - shape.pitch},
                 {kUnbounded, shape.pitch},
                 {shape.slabs, cuuint64_t(tensor.box_bytes), box_slabs}});
}

cudaError_t encode_ragged_store(CUtensorMap* descriptor, TensorView tensor, int64_t columns,
                                int box_rows, int shift) {
  Shape const shape(tensor, columns);
  return encode(descriptor, tensor, shape.base - shape.pitch * shift,
                {{shape.columns, 0, shape.box},
                 {cuuint64_t(shift), shape.pitch, box_rows},
                 {kUnbounded, shape.pitch}});
}

}  // namespace jgg::sm90
