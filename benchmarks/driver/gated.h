// Problems that compute gate, up and hidden of an expert MLP, whose rows are copies of tokens.
#pragma once

#include <algorithm>
#include <random>

#include "mlp/gated_ragged_dot.h"
#include "problem.h"
#include "rows/rows.h"

namespace driver {

// The number of pairs of each token.
constexpr int kChoices = 8;

// Compares the kernel's gate and up with sums in double precision. Compares its hidden with the
// hidden that follows from its gate and up.
static __global__ void compare_gated(jgg::mlp::GatedArguments a, int const* group_of_row,
                                     int samples, int* worst) {
  int const warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (warp >= samples) return;
  uint64_t const bits = hash(warp);
  int64_t const row = (bits & 0xffffffff) % a.groups.rows, column = (bits >> 32) % a.n;
  int64_t const group = group_of_row[row], element = row * a.n + column;
  int const pair = a.rows[row], token = pair < 0 ? -1 : pair / a.divisor;
  auto const at = [](void const* data, int64_t i) { return load(data, Element::kBf16, i); };
  float ratio = 0;
  double kept[2];
  void const* const weights[] = {a.gate_weights, a.up_weights};
  void const* const results[] = {a.gate, a.up};
  for (int i = 0; i < 2; ++i) {
    double sum = 0, magnitude = 0;
    for (int64_t k = lane; group >= 0 && token >= 0 && token < a.tokens && k < a.k; k += 32) {
      double const term =
          at(a.x, int64_t(token) * a.k + k) * at(weights[i], (group * a.k + k) * a.n + column);
      sum += term;
      magnitude += fabs(term);
    }
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, step);
      magnitude += __shfl_xor_sync(0xffffffff, magnitude, step);
    }
    kept[i] = at(results[i], element);
    double const error = fabs(kept[i] - sum);
    bool const is_number = error < INFINITY;
    if (error != 0)
      ratio = fmaxf(ratio, is_number ? error / (0x1p-8 * fabs(sum) + 1e-5 * magnitude) : INFINITY);
  }
  double const hidden = kept[0] / (1 + exp(-kept[0])) * kept[1];
  double const error = fabs(at(a.hidden, element) - hidden);
  ratio = fmaxf(ratio, error < INFINITY ? error / (0x1.1p-8 * fabs(hidden) + 1e-6) : INFINITY);
  if (lane == 0) atomicMax(worst, __float_as_int(ratio));
}

// There are rows / 8 tokens, and a tenth of the rows has no token. The product of "gated_in_place"
// reads tokens where they are. For "gated_copies" another kernel first copies tokens to rows.
inline Prepared prepare_gated(Problem const& problem) {
  Prepared prepared{};
  int64_t const m = problem.rows, k = problem.k, n = problem.n, groups = problem.groups;
  int const tokens = std::max<int>(problem.rows / kChoices, 1);
  std::mt19937 random(1);
  std::vector<int> pairs, group_of_row(m, -1);
  for (int group = 0; group < problem.groups; ++group) {
    std::vector<int> own;
    for (int i = 0; i < problem.sizes.at(group) && int64_t(pairs.size() + own.size()) < m; ++i) {
      own.push_back(random() % 10 == 0 ? -1 - int(random() % 9) : random() % (tokens * kChoices));
    }
    std::sort(own.begin(), own.end());
    std::fill_n(group_of_row.begin() + pairs.size(), own.size(), group);
    pairs.insert(pairs.end(), own.begin(), own.end());
  }
  pairs.resize(m, tokens * kChoices);

  jgg::mlp::GatedArguments a{};
  a.x = prepared.keep<void>(random_data<__nv_bfloat16>(tokens * k, kLhs));
  a.rows = prepared.keep<int>(to_device(pairs));
  a.divisor = kChoices;
  a.tokens = tokens;
  a.gate_weights = prepared.keep<void>(random_data<__nv_bfloat16>(groups * k * n, kRhs));
  a.up_weights = prepared.keep<void>(random_data<__nv_bfloat16>(groups * k * n, kRhsScales));
  for (void** result : {&a.hidden, &a.gate, &a.up}) {
    *result = prepared.keep<void>(allocate(m * n * sizeof(__nv_bfloat16)));
    require(cudaMemset(*result, 0xff, m * n * sizeof(__nv_bfloat16)), "cudaMemset");
  }
  a.type = jgg::ElementType::kBf16;
  a.has_activation = true;
  a.activation = {1.0f, 0.0f, INFINITY, 0.0f};
  a.groups.sizes = prepared.keep<int>(to_device(problem.sizes));
  a.groups.offset = prepared.keep<int>(to_device(std::vector<int>{0}));
  a.groups.batches = 1;
  a.groups.groups = a.groups.local_groups = problem.groups;
  a.groups.rows = problem.rows;
  a.k = problem.k;
  a.n = problem.n;

  jgg::mlp::GatedArguments product = a;
  jgg::rows::GatherArguments copies{};
  bool const in_place = problem.kind == "gated_in_place";
  if (!in_place) {
    copies.shape = {jgg::ElementType::kBf16, problem.k, 1};
    copies.rows.rows = problem.rows;
    copies.x = {a.x, 0};
    copies.index = {a.rows, 0};
    copies.tokens = tokens;
    copies.divisor = kChoices;
    copies.y = prepared.keep<void>(allocate(m * k * sizeof(__nv_bfloat16)));
    product.x = copies.y;
    product.rows = nullptr;
    product.tokens = problem.rows;
  }
  prepared.launch = [=](cudaStream_t stream) {
    if (!in_place) {
      cudaError_t const status = jgg::rows::gather_rows(copies, stream);
      if (status != cudaSuccess) return status;
    }
    return jgg::mlp::gated_ragged_dot(jgg::TileConfig{128, 256, 2}, product, stream);
  };
  prepared.flops = 4.0 * problem.used_rows() * k * n;
  auto const* const owners = prepared.keep<int>(to_device(group_of_row));
  prepared.worst_error = [=](int samples) {
    auto const worst = allocate(sizeof(int));
    require(cudaMemset(worst.get(), 0, sizeof(int)), "cudaMemset");
    compare_gated<<<(samples + 7) / 8, 256>>>(a, owners, samples, static_cast<int*>(worst.get()));
    require(cudaGetLastError(), "compare_gated");
    float ratio = 0;
    require(cudaMemcpy(&ratio, worst.get(), sizeof(float), cudaMemcpyDeviceToHost), "compare");
    return ratio;
  };
  return prepared;
}

}  // namespace driver
