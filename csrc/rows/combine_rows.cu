// Adds up the rows of every token.
#include "rows/vector.h"
#include "sm90/dependent_launch.h"

namespace jgg::rows {
namespace {

// A thread has loads of `kAtOnce` rows in flight. With two rows, a multiprocessor has registers for
// more threads than with eight rows.
template <class T, bool kAligned, bool kWeighted, int kAtOnce>
__global__ void __launch_bounds__(kThreads)
    combine_rows_kernel(CombineArguments arguments, Sharing sharing) {
  using Part = Vector<T, kAligned>;
  Pairs const& pairs = arguments.pairs;
  int const batch = blockIdx.z, columns = arguments.shape.columns;
  Place const place(sharing, blockIdx.x, gridDim.x);
  int const column = place.vector * Part::kElements;
  if (place.row >= pairs.tokens || column >= columns) return;

  unsigned const rows = valid_rows(arguments.rows, batch);
  int64_t const token = place.row;
  int64_t const first_pair = token * pairs.choices;
  int const* const row_of = pairs.row.data ? pairs.row.of(batch) + first_pair : nullptr;
  float const* const weight_of = kWeighted ? pairs.weights.of(batch) + first_pair : nullptr;
  auto const* const y = arguments.y.as<T>(batch) + column;
  sm90::await_previous();
  float sum[Part::kElements] = {};
  for (int first = 0; first < pairs.choices; first += kAtOnce) {
    unsigned row[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      bool const exists = first + i < pairs.choices;
      row[i] = ~0u;
      if (exists) row[i] = row_of ? __ldg(row_of + first + i) : first_pair + first + i;
      if constexpr (kWeighted) weight[i] = exists ? __ldg(weight_of + first + i) : 0;
    }
    Part part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      part[i] = {};
      if (row[i] < rows) part[i] = Part::load_once(y + static_cast<int64_t>(row[i]) * columns);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // The weight of a pair without a row may be NaN or infinite, and zero times such a weight is
      // NaN.
      if (row[i] >= rows) continue;
#pragma unroll
      for (int j = 0; j < Part::kElements; ++j) {
        sum[j] = kWeighted ? fmaf(weight[i], part[i][j], sum[j]) : sum[j] + part[i][j];
      }
    }
  }
  T* const x = static_cast<T*>(arguments.x) +
               (static_cast<int64_t>(batch) * pairs.tokens + token) * columns + column;
  Part::of([&](int j) { return sum[j]; }).store(x);
}

template <class T, bool kAligned, bool kWeighted>
auto kernel_for(int choices) {
  if (!kAligned || choices > 4) return combine_rows_kernel<T, kAligned, kWeighted, 8>;
  if (choices > 2) return combine_rows_kernel < T, kAligned, kWeighted, kAligned ? 4 : 8 > ;
  return combine_rows_kernel < T, kAligned, kWeighted, kAligned ? 2 : 8 > ;
}

}  // namespace

cudaError_t combine_rows(CombineArguments const& arguments, cudaStream_t stream) {
  return with_type(arguments.shape, [&](auto type, auto aligned) {
    using T = typename decltype(type)::type;
    using Part = Vector<T, aligned.value>;
    auto const sharing = Sharing::of(arguments.shape.columns / Part::kElements, 128, true);
    int64_t const down = divide_up(arguments.pairs.tokens, sharing.down());
    int const choices = arguments.pairs.choices;
    auto const kernel = arguments.pairs.weights.data ? kernel_for<T, aligned.value, true>(choices)
                                                     : kernel_for<T, aligned.value, false>(choices);
    return sm90::launch_after(arguments.follows, kernel,
                              sharing.grid(down, arguments.shape.batches), sharing.block(), stream,
                              arguments, sharing);
  });
}

}  // namespace jgg::rows
