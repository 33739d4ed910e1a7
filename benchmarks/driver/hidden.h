// Problems of the elementwise steps of an MLP in FP8, and of copies of quantised tokens to rows.
#pragma once

#include <numeric>
#include <random>

#include "mlp/quantized_hidden.h"
#include "quantizer.h"
#include "rows/rows.h"

namespace driver {

constexpr jgg::mlp::QuantizedHiddenFormat kHiddenFormat{jgg::ElementType::kE4m3, false};

// Hidden and the gradients of gate and up in double precision. The activation is silu.
struct HiddenReference {
  double hidden, dgate, dup, unweighted;

  __device__ HiddenReference(double gate, double up, double weight, double dh) {
    double const s = 1 / (1 + exp(-gate));
    unweighted = gate * s * up;
    hidden = unweighted * weight;
    dgate = dh * weight * up * (s + gate * s * (1 - s));
    dup = dh * weight * gate * s;
  }
};

__device__ inline double from_e4m3(uint8_t bits) {
  __nv_fp8_e4m3 x;
  x.__x = bits;
  return static_cast<float>(x);
}

// Returns whether `q` times `scale` is close enough to `want`, which the kernel rounds to bfloat16
// before it quantises it.
__device__ inline bool is_quantized(double want, uint8_t q, float scale) {
  double const got = from_e4m3(q) * scale;
  return fabs(got - want) <= (0x1p-4 + 0x1p-7) * fabs(want) + scale * 0x1.1p-10;
}

__device__ inline bool is_rounded(double want, __nv_bfloat16 got, double largest) {
  return fabs(double(__bfloat162float(got)) - want) <= 0x1.2p-8 * fabs(want) + 1e-5 * largest;
}

// Counts wrong results. A thread checks a block of columns of a row at a time. Without dh, only
// hidden is checked.
static __global__ void compare_hidden(jgg::mlp::QuantizedGradients z, int* wrong) {
  jgg::mlp::Projections const& p = z.projections;
  int const blocks = p.blocks(), pitch = p.pitch();
  auto const* projections = static_cast<__nv_bfloat16 const*>(p.data);
  auto const* dh = static_cast<__nv_bfloat16 const*>(z.dh);
  int bad = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < int64_t(p.rows) * blocks;
       i += int64_t(gridDim.x) * blockDim.x) {
    int64_t const row = i / blocks;
    int const block = i % blocks, first = block * kBlock;
    auto const at = [&](int c) {
      auto const* of_row = projections + row * 2 * pitch;
      return HiddenReference(__bfloat162float(of_row[c]), __bfloat162float(of_row[pitch + c]),
                             p.weights[row],
                             dh ? double(__bfloat162float(dh[row * p.columns + c])) : 0.0);
    };
    double most[3] = {}, dweight = 0, magnitude = 0;
    int const end = min(first + int(kBlock), p.columns);
    for (int c = first; c < end; ++c) {
      HiddenReference const want = at(c);
      most[0] = fmax(most[0], fabs(want.hidden));
      most[1] = fmax(most[1], fabs(want.dgate));
      most[2] = fmax(most[2], fabs(want.dup));
      if (!dh) continue;
      double const term = double(__bfloat162float(dh[row * p.columns + c])) * want.unweighted;
      dweight += term;
      magnitude += fabs(term);
    }
    auto const is_scale = [&](float scale, double largest) {
      return fabs(scale * 448.0 - largest) <= 0x1p-7 * largest;
    };
    if (!dh) {
      float const scale = z.scale[i];
      bad += !is_scale(scale, most[0]);
      for (int c = first; c < end; ++c) {
        bad += !is_quantized(at(c).hidden, z.q[row * p.columns + c], scale);
      }
      continue;
    }
    float const* scale = z.scale + row * 2 * blocks + block;
    bad += !is_scale(scale[0], most[1]) + !is_scale(scale[blocks], most[2]);
    bad += fabs(z.dweights[i] - dweight) > 1e-4 * magnitude;
    for (int c = first; c < first + int(kBlock); ++c) {
      uint8_t const* q = z.q + row * 2 * pitch + c;
      if (c >= end) {
        bad += q[0] != 0 || q[pitch] != 0;
        continue;
      }
      HiddenReference const want = at(c);
      int64_t const here = row * p.columns + c;
      bad += !is_quantized(want.dgate, q[0], scale[0]);
      bad += !is_quantized(want.dup, q[pitch], scale[blocks]);
      bad += !is_rounded(want.dgate, static_cast<__nv_bfloat16*>(z.dgate)[here], most[1]);
      bad += !is_rounded(want.dup, static_cast<__nv_bfloat16*>(z.dup)[here], most[2]);
      bad += !is_rounded(want.hidden, static_cast<__nv_bfloat16*>(z.hidden)[here], most[0]);
    }
  }
  if (bad) atomicAdd(wrong, bad);
}

// Sets the padding of projections to zero. In a layer it is zero because the weights are padded.
static __global__ void clear_padding(__nv_bfloat16* projections, int64_t rows, int columns,
                                     int pitch) {
  int64_t const padding = pitch - columns, count = rows * 2 * padding;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * blockDim.x) {
    projections[i / padding * pitch + columns + i % padding] = 0;
  }
}

// "quantize_hidden" quantises hidden [rows, n]. "quantize_gradients" computes hidden, and quantises
// the gradients of gate and up.
inline Prepared prepare_hidden(Problem const& problem, bool is_gradient) {
  Prepared prepared{};
  prepared.most_error = 0;
  jgg::mlp::QuantizedGradients z{};
  auto& p = z.projections;
  p.rows = problem.rows;
  p.columns = problem.n;
  p.activation = {1.0f, 0.0f, INFINITY, 0.0f};
  int64_t const rows = p.rows, pitch = p.pitch(), blocks = p.blocks(), hidden = rows * p.columns;
  auto* data = prepared.keep<__nv_bfloat16>(random_data<__nv_bfloat16>(rows * 2 * pitch, kLhs));
  if (pitch > p.columns) clear_padding<<<1024, 256>>>(data, rows, p.columns, pitch);
  p.data = data;
  p.weights = prepared.keep<float>(random_data<float>(rows, kLhsScales));
  prepared.bytes = rows * (2.0 * 2 * pitch + sizeof(float));
  auto const keep_values = [&](int64_t count) {
    prepared.bytes += 2.0 * count;
    auto* values = prepared.keep<void>(allocate(2 * count));
    require(cudaMemset(values, 0xff, 2 * count), "cudaMemset");
    return values;
  };
  int64_t const quantized = is_gradient ? 2 * rows * pitch : hidden;
  Form const form(prepared, quantized, (is_gradient ? 2 : 1) * rows * blocks);
  z.q = form.q;
  z.scale = form.scale;
  if (is_gradient) {
    z.dh = prepared.keep<void>(random_data<__nv_bfloat16>(hidden, kRhs));
    prepared.bytes += 2.0 * hidden + sizeof(float) * rows * blocks;
    z.dgate = keep_values(hidden);
    z.dup = keep_values(hidden);
    z.hidden = keep_values(hidden);
    z.dweights = prepared.keep<float>(allocate(sizeof(float) * rows * blocks));
  }
  prepared.launch = [=](cudaStream_t stream) {
    return is_gradient
               ? jgg::mlp::quantize_gradients(kHiddenFormat, z, stream)
               : jgg::mlp::quantize_hidden(
                     kHiddenFormat,
                     {.projections = z.projections, .count = nullptr, .q = z.q, .scale = z.scale},
                     stream);
  };
  prepared.worst_error = [=](int) {
    auto const wrong = allocate(sizeof(int));
    require(cudaMemset(wrong.get(), 0, sizeof(int)), "cudaMemset");
    compare_hidden<<<4096, 128>>>(z, static_cast<int*>(wrong.get()));
    require(cudaGetLastError(), "compare_hidden");
    int count = 0;
    require(cudaMemcpy(&count, wrong.get(), sizeof(int), cudaMemcpyDeviceToHost), "compare");
    return float(count);
  };
  return prepared;
}

static __global__ void compare_copies(uint8_t const* x, uint8_t const* y, int const* row_of_pair,
                                      int64_t pairs, int choices, int bytes, int* wrong) {
  int bad = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs * bytes;
       i += int64_t(gridDim.x) * blockDim.x) {
    int64_t const pair = i / bytes, byte = i % bytes;
    bad += x[pair / choices * bytes + byte] != y[int64_t(row_of_pair[pair]) * bytes + byte];
  }
  if (bad) atomicAdd(wrong, bad);
}

// "dispatch_fp8" copies each of rows / groups tokens, k values with their scales, to `groups` rows.
inline Prepared prepare_dispatch(Problem const& problem) {
  Prepared prepared{};
  prepared.most_error = 0;
  int const choices = problem.groups, tokens = problem.rows / choices, rows = tokens * choices;
  std::vector<int> row_of_pair(rows), pair_of_row(rows);
  std::iota(row_of_pair.begin(), row_of_pair.end(), 0);
  std::shuffle(row_of_pair.begin(), row_of_pair.end(), std::mt19937(1));
  for (int i = 0; i < rows; ++i) pair_of_row[row_of_pair[i]] = i;
  auto* to = prepared.keep<int>(to_device(row_of_pair));
  auto* from = prepared.keep<int>(to_device(pair_of_row));
  std::vector<jgg::rows::DispatchArguments> moves;
  for (bool const is_scale : {false, true}) {
    int const bytes = is_scale ? int(blocks(problem.k) * sizeof(float)) : problem.k;
    jgg::rows::DispatchArguments a{};
    a.gather.shape = {is_scale ? jgg::ElementType::kF32 : jgg::ElementType::kBf16,
                      is_scale ? bytes / 4 : bytes / 2, 1};
    a.gather.rows.rows = rows;
    a.gather.x = {prepared.keep<void>(random_data<__nv_fp8_e4m3>(int64_t(tokens) * bytes, kLhs)),
                  0};
    a.gather.index = {from, 0};
    a.gather.tokens = tokens;
    a.gather.divisor = choices;
    a.gather.y = prepared.keep<void>(allocate(int64_t(rows) * bytes));
    a.pairs.row = {to, 0};
    a.pairs.tokens = tokens;
    a.pairs.choices = choices;
    prepared.bytes += double(tokens + rows) * bytes;
    moves.push_back(a);
  }
  prepared.launch = [=](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (auto const& a : moves) {
      if (status == cudaSuccess) status = jgg::rows::dispatch_rows(a, stream);
    }
    return status;
  };
  prepared.worst_error = [=](int) {
    auto const wrong = allocate(sizeof(int));
    require(cudaMemset(wrong.get(), 0, sizeof(int)), "cudaMemset");
    for (auto const& a : moves) {
      int const bytes =
          a.gather.shape.columns * (a.gather.shape.type == jgg::ElementType::kF32 ? 4 : 2);
      compare_copies<<<4096, 256>>>(static_cast<uint8_t const*>(a.gather.x.data),
                                    static_cast<uint8_t const*>(a.gather.y), to, rows, choices,
                                    bytes, static_cast<int*>(wrong.get()));
    }
    int count = 0;
    require(cudaMemcpy(&count, wrong.get(), sizeof(int), cudaMemcpyDeviceToHost), "compare");
    return float(count);
  };
  return prepared;
}

}  // namespace driver
