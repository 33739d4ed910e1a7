// Problems that quantise bfloat16 data to FP8, and a copy, which shows how fast memory is.
#pragma once

#include "quantize/quantize.h"
#include "scaled.h"

namespace driver {

// Matrices x [matrices, rows, columns] and their quantised form. A block of block_rows x
// block_columns elements shares a scale. If `starts` is given, rows belong to groups, and x is one
// matrix. Row block i then begins at row starts[i], ends before row starts[i + 1], and is in one
// group. The result is q [row_blocks, columns, block_rows] and scale [row_blocks, columns].
struct Quantized {
  __nv_bfloat16 const* x;
  uint8_t const* q;
  float const* scale;
  int matrices;
  int64_t rows;
  int64_t columns;
  int block_rows;
  int block_columns;
  bool transposed;     // whether q has the transpose of each matrix or block
  int const* starts;   // [row_blocks + 1], or null
  int64_t row_blocks;  // used if `starts` is given
};

// Rounds a float to the nearest e4m3, as the kernels do.
__device__ inline uint8_t to_e4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// Counts wrong elements and wrong scales. A thread checks one block at a time.
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
    // The largest magnitude is zero only in blocks without rows, because data are random.
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

// The memory of an FP8 form of an operand, which a quantiser writes.
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

// "quantize_rows" quantises x [rows, k] in blocks of 1 x 128.
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

// "quantize_weights" quantises w [groups, k, n] in blocks of 128 x 128, plain and transposed.
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

// "quantize_ragged" quantises x [rows, k] in blocks of 1 x 128, and its transpose in blocks of 128
// rows of a group.
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
  // The remaining blocks have no rows.
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

// "copy" copies a gibibyte, whatever the shape.
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
