// Computes the inner products of every token with its rows. They are the gradient of the weights of
// a weighted sum of rows. A warp takes a token, and always adds up the sums of its lanes in the
// same order.
#include "rows/vector.h"

namespace jgg::rows {
namespace {

constexpr int kAtOnce = 8;  // rows that are read side by side

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) row_dots_kernel(DotsArguments arguments) {
  using Part = Vector<T, kAligned>;
  Pairs const& pairs = arguments.pairs;
  int const batch = blockIdx.z, columns = arguments.shape.columns, lane = threadIdx.x % 32;
  int64_t const token = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (token >= pairs.tokens) return;

  unsigned const rows = valid_rows(arguments.rows, batch);
  int const* const row_of = pairs.row.of(batch) + token * pairs.choices;
  auto const* const x = arguments.x.as<T>(batch) + token * columns;
  auto const* const y = arguments.y.as<T>(batch);
  float* const weights =
      arguments.weights + (static_cast<int64_t>(batch) * pairs.tokens + token) * pairs.choices;
  for (int first = 0; first < pairs.choices; first += kAtOnce) {
    unsigned row[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = first + i < pairs.choices ? __ldg(row_of + first + i) : ~0u;
    }
    float sum[kAtOnce] = {};
    for (int column = lane * Part::kElements; column < columns; column += 32 * Part::kElements) {
      Part const of_token = Part::load(x + column);
      Part part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        part[i] = {};
        if (row[i] < rows) {
          part[i] = Part::load_once(y + static_cast<int64_t>(row[i]) * columns + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // A token may have NaN or infinities, and zero times these is NaN. A pair without a row
        // must give zero.
        if (row[i] >= rows) continue;
#pragma unroll
        for (int j = 0; j < Part::kElements; ++j) {
          sum[i] = fmaf(of_token[j], part[i][j], sum[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
      }
      if (lane == i && first + i < pairs.choices) weights[first + i] = sum[i];
    }
  }
}

}  // namespace

cudaError_t row_dots(DotsArguments const& arguments, cudaStream_t stream) {
  return with_type(arguments.shape, [&](auto type, auto aligned) {
    using T = typename decltype(type)::type;
    dim3 const grid(static_cast<unsigned>(divide_up(arguments.pairs.tokens, kThreads / 32)), 1,
                    arguments.shape.batches);
    row_dots_kernel<T, aligned.value><<<grid, kThreads, 0, stream>>>(arguments);
    return cudaGetLastError();
  });
}

}  // namespace jgg::rows
