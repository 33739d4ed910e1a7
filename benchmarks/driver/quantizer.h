// FP8 quantisers of bfloat16 data, and a copy of as much memory as shows what they could reach.
#pragma once

#include "quantize/quantize.h"
#include "scaled.h"

namespace driver {

// Blocks of `rows` x `columns` elements that share a scale, in one of several matrices. A block row
// of a group is a block of its own: `starts` are the first rows of all of them, and the end.
struct Quantized {
  __nv_bfloat16 const* x;
  uint8_t const* q;
  float const* scale;
  int matrices;
  int64_t rows;
  int64_t columns;
  int block_rows;
  int block_columns;
  bool transposed;    // q is [columns, rows] of each matrix; or, with `starts`,
  int const* starts;  // [row_blocks + 1] rows of x: q [row_blocks, columns, block_rows], and scales
  int64_t row_blocks;  // [row_blocks, columns]
};

// Rounds a float to the nearest e4m3, as the kernels do.
__device__ inline uint8_t to_e4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// A thread a block of elements. Counts elements and scales that are not what they should be.
static __global__ void compare_quantized(Quantized z, int* wrong) {
  int64_t const across = (z.columns + z.block_columns - 1) / z.block_columns;
  int64_t const down = z.starts ? z.row_blocks : (z.rows + z.block_rows - 1) / z.block_rows;
  int64_t const count = z.matrices * across * down;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * blockDim.x) {
    int64_t const block_column = i % across, block_row = i / across % down;
    int64_t const matrix = i / across / down;
    int64_t const first = z.starts ? z.starts[block_row] : block_row * z.block_rows;
    int64_t const end = z.starts ? z.starts[block_row + 1] : min(first + z.block_rows, z.rows);
    int64_t const left = block_column * z.block_columns;
    int64_t const right = min(left + z.block_columns, z.columns);
    __nv_bfloat16 const* x = z.x + matrix * z.rows * z.columns;
    float largest = 0;
    for (int64_t r = first; r < end; ++r) {
      for (int64_t c = left; c < right; ++c) {
        largest = fmaxf(largest, fabsf(__bfloat162float(x[r * z.columns + c])));
      }
    }
    // Normal data: no block is near zero but those without rows.
    float const scale = largest > 0 ? largest * (1 / 448.0f) : 1;
    int64_t const scale_at = z.starts || !z.transposed
                                 ? (matrix * down + block_row) * across + block_column
                                 : (matrix * across + block_column) * down + block_row;
    int bad = z.scale[scale_at] != scale;
    int64_t const last = z.starts ? first + z.block_rows : end;
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = left; c < right; ++c) {
        if (!z.transposed && r >= end) continue;
        uint8_t const want =
            r < end ? to_e4m3(__bfloat162float(x[r * z.columns + c]) * __frcp_rn(scale)) : 0;
        int64_t const at = !z.transposed ? (matrix * z.rows + r) * z.columns + c
                           : z.starts    ? (block_row * z.columns + c) * z.block_rows + (r - first)
                                         : (matrix * z.columns + c) * z.rows + r;
        bad += z.q[at] != want;
      }
    }
    if (bad) atomicAdd(wrong, bad);
  }
}

inline float count_wrong(Quantized const& quantized) {
  auto const wrong = allocate(sizeof(int));
  require(cudaMemset(wrong.get(), 0, sizeof(int)), "cudaMemset");
  compare_quantized<<<4096, 128>>>(quantized, static_cast<int*>(wrong.get()));
  require(cudaGetLastError(), "compare_quantized");
  int count = 0;
  require(cudaMemcpy(&count, wrong.get(), sizeof(int), cudaMemcpyDeviceToHost), "compare");
  return float(count);
}

constexpr jgg::quantize::QuantizeFormat kQuantizeFormat{jgg::ElementType::kBf16,
                                                        jgg::ElementType::kE4m3, false};

// An FP8 form of an operand, for a quantiser to write.
struct Form {
  uint8_t* q;
  float* scale;

  Form(Prepared& prepared, int64_t values, int64_t scales) {
    q = prepared.keep<uint8_t>(allocate(values));
    scale = prepared.keep<float>(allocate(scales * sizeof(float)));
    prepared.bytes += double(values) + double(scales) * sizeof(float);
    require(cudaMemset(q, 0xff, values), "cudaMemset");
    require(cudaMemset(scale, 0xff, scales * sizeof(float)), "cudaMemset");
  }
};

inline __nv_bfloat16* quantizer_operand(Prepared& prepared, int64_t count) {
  prepared.most_error = 0;
  prepared.bytes += double(count) * sizeof(__nv_bfloat16);
  return prepared.keep<__nv_bfloat16>(random_data<__nv_bfloat16>(count, kLhs));
}

// "quantize_rows": x [rows, k] in blocks of 1 x 128.
inline Prepared prepare_quantize_rows(Problem const& problem) {
  int64_t const m = problem.rows, k = problem.k;
  Prepared prepared{};
  auto* x = quantizer_operand(prepared, m * k);
  Form const form(prepared, m * k, m * blocks(k));
  prepared.launch = [=](cudaStream_t stream) {
    return jgg::quantize::quantize_rows(kQuantizeFormat, {x, form.q, form.scale, int(m), int(k)},
                                        stream);
  };
  prepared.worst_error = [=](int) {
    return count_wrong({x, form.q, form.scale, 1, m, k, 1, int(kBlock)});
  };
  return prepared;
}

// "quantize_weights": w [groups, k, n] in blocks of 128 x 128, both ways round.
inline Prepared prepare_quantize_weights(Problem const& problem) {
  int64_t const g = problem.groups, k = problem.k, n = problem.n;
  Prepared prepared{};
  auto* x = quantizer_operand(prepared, g * k * n);
  int64_t const scales = g * blocks(k) * blocks(n);
  Form const plain(prepared, g * k * n, scales), transposed(prepared, g * k * n, scales);
  prepared.launch = [=](cudaStream_t stream) {
    return jgg::quantize::quantize_blocks(
        kQuantizeFormat,
        {x, plain.q, plain.scale, transposed.q, transposed.scale, int(g), int(k), int(n)}, stream);
  };
  prepared.worst_error = [=](int) {
    Quantized z{x, plain.q, plain.scale, int(g), k, n, int(kBlock), int(kBlock)};
    float const wrong = count_wrong(z);
    z.q = transposed.q;
    z.scale = transposed.scale;
    z.transposed = true;
    return wrong + count_wrong(z);
  };
  return prepared;
}

// "quantize_ragged": x [rows, k] in blocks of 1 x 128, and transposed in blocks of 128 rows of a
// group.
inline Prepared prepare_quantize_ragged(Problem const& problem) {
  int64_t const m = problem.rows, k = problem.k;
  int64_t const row_blocks = blocks(m) + std::min(problem.groups, problem.rows);
  Prepared prepared{};
  auto* x = quantizer_operand(prepared, m * k);
  Form const plain(prepared, m * k, m * blocks(k));
  Form const transposed(prepared, k * row_blocks * kBlock, row_blocks * k);
  auto* sizes = prepared.keep<int>(to_device(problem.sizes));
  prepared.launch = [=, groups = problem.groups](cudaStream_t stream) {
    return jgg::quantize::quantize_ragged(
        kQuantizeFormat,
        {x, sizes, plain.q, plain.scale, transposed.q, transposed.scale, 1, false, false, groups,
         int(m), int(k), int(row_blocks)},
        stream);
  };
  std::vector<int> starts;
  int at = 0;
  for (int const size : problem.sizes) {
    for (int done = 0; done < size; done += kBlock) starts.push_back(at + done);
    at += size;
  }
  // Blocks past the last one are without rows.
  starts.resize(row_blocks + 1, at);
  auto* starts_on_device = prepared.keep<int>(to_device(starts));
  prepared.worst_error = [=](int) {
    Quantized z{x, plain.q, plain.scale, 1, m, k, 1, int(kBlock)};
    float const wrong = count_wrong(z);
    z = {x, transposed.q, transposed.scale, 1,         m, k, int(kBlock),
         1, true,         starts_on_device, row_blocks};
    return wrong + count_wrong(z);
  };
  return prepared;
}

static __global__ void copy_all(uint4 const* from, uint4* to, size_t count) {
  size_t const stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    to[i] = from[i];
  }
}

// "copy": a gibibyte, whatever the shape.
inline Prepared prepare_copy() {
  constexpr size_t kBytes = size_t(1) << 30;
  Prepared prepared{};
  auto* from = prepared.keep<void>(allocate(kBytes));
  auto* to = prepared.keep<void>(allocate(kBytes));
  require(cudaMemset(from, 0x5a, kBytes), "cudaMemset");
  prepared.bytes = 2.0 * kBytes;
  prepared.launch = [=](cudaStream_t stream) {
    copy_all<<<16384, 512, 0, stream>>>(static_cast<uint4 const*>(from), static_cast<uint4*>(to),
                                        kBytes / sizeof(uint4));
    return cudaGetLastError();
  };
  prepared.worst_error = [](int) { return 0.0f; };
  return prepared;
}

}  // namespace driver
