// Copies tokens to rows, row by row. This needs no inverse of the indices.
#include <algorithm>

#include "rows/vector.h"

namespace jgg::rows {
namespace {

constexpr int kAtOnce = 4;  // rows of a thread: loads in flight

// The bytes of tokens that the cache holds while their copies pass through it. Tokens with more
// bytes are copied some columns at a time, so that each token is read from memory once.
constexpr int64_t kCachedBytes = 16 << 20;

template <class T, bool kAligned, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1)
    gather_rows_kernel(GatherArguments arguments, Sharing sharing) {
  using Part = Vector<T, kAligned>;
  int const batch = blockIdx.z, columns = arguments.shape.columns;
  Place const place(sharing, blockIdx.x, gridDim.x);
  int const column = place.vector * Part::kElements;
  unsigned const first = static_cast<unsigned>(place.row) * kAtOnce;
  unsigned const rows = valid_rows(arguments.rows, batch);
  if (first >= rows || column >= columns) return;

  unsigned const sources = static_cast<unsigned>(arguments.tokens) * arguments.divisor;
  int const* const index = arguments.index.of(batch) + first;
  unsigned source[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) source[i] = first + i < rows ? __ldg(index + i) : ~0u;

  auto const* const x = arguments.x.as<T>(batch);
  Part part[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    int64_t const token = source[i] / arguments.divisor;
    part[i] = {};
    if (source[i] < sources) part[i] = Part::load(x + token * columns + column);
  }
  T* const y = static_cast<T*>(arguments.y) +
               (static_cast<int64_t>(batch) * arguments.rows.rows + first) * columns + column;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (first + i >= rows) break;
    if constexpr (kWeighted) {
      if (source[i] < sources) {
        part[i] = part[i].times(__ldg(arguments.weights.of(batch) + source[i]));
      }
    }
    part[i].store_streaming(y + static_cast<int64_t>(i) * columns);
  }
}

}  // namespace

cudaError_t gather_rows(GatherArguments const& arguments, cudaStream_t stream) {
  return with_type(arguments.shape, [&](auto type, auto aligned) {
    using T = typename decltype(type)::type;
    using Part = Vector<T, aligned.value>;
    int const vectors = arguments.shape.columns / Part::kElements;
    int64_t const bytes_of_column = static_cast<int64_t>(arguments.tokens) * sizeof(Part);
    int const widest =
        static_cast<int>(std::clamp<int64_t>(kCachedBytes / bytes_of_column, 32, 128));
    bool const fits = bytes_of_column * vectors <= kCachedBytes;
    auto const sharing = Sharing::of(vectors, fits ? 128 : widest, fits);
    int64_t const down = divide_up(arguments.rows.rows, sharing.down() * kAtOnce);
    auto const kernel = arguments.weights.data ? gather_rows_kernel<T, aligned.value, true>
                                               : gather_rows_kernel<T, aligned.value, false>;
    kernel<<<sharing.grid(down, arguments.shape.batches), sharing.block(), 0, stream>>>(arguments,
                                                                                        sharing);
    return cudaGetLastError();
  });
}

}  // namespace jgg::rows
