// Copies tokens to rows, token by token. Each token is read once, even if it is copied several
// times and does not stay in the cache.
#include "rows/vector.h"

namespace jgg::rows {
namespace {

constexpr int kAtOnce = 8;  // row numbers of a token that a thread holds at a time

// Writes zeros to the rows that no token is copied to. A warp looks at 32 rows.
template <class T, bool kAligned>
__device__ void clear_rows(GatherArguments const& arguments, unsigned first, unsigned rows,
                           int batch) {
  using Part = Vector<T, kAligned>;
  int const columns = arguments.shape.columns, lane = threadIdx.y * blockDim.x + threadIdx.x;
  unsigned const sources = static_cast<unsigned>(arguments.tokens) * arguments.divisor;
  unsigned const row = first + lane % 32;
  bool const is_empty =
      row < rows && static_cast<unsigned>(__ldg(arguments.index.of(batch) + row)) >= sources;
  T* const y =
      static_cast<T*>(arguments.y) + static_cast<int64_t>(batch) * arguments.rows.rows * columns;
  for (unsigned empty = __ballot_sync(~0u, is_empty); empty != 0; empty &= empty - 1) {
    T* const to = y + static_cast<int64_t>(first + __ffs(empty) - 1) * columns;
    for (int column = lane % 32 * Part::kElements; column < columns;
         column += 32 * Part::kElements) {
      Part{}.store_streaming(to + column);
    }
  }
}

template <class T, bool kAligned, bool kWeighted>
__global__ void __launch_bounds__(kThreads)
    dispatch_rows_kernel(DispatchArguments arguments, Sharing sharing, unsigned clearing_blocks) {
  using Part = Vector<T, kAligned>;
  GatherArguments const& gather = arguments.gather;
  Pairs const& pairs = arguments.pairs;
  int const batch = blockIdx.z, columns = gather.shape.columns;
  unsigned const rows = valid_rows(gather.rows, batch);
  if (blockIdx.x < clearing_blocks) {
    unsigned const warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
    clear_rows<T, kAligned>(gather, blockIdx.x * kThreads + warp * 32, rows, batch);
    return;
  }
  Place const place(sharing, blockIdx.x - clearing_blocks, gridDim.x - clearing_blocks);
  int const column = place.vector * Part::kElements;
  if (place.row >= pairs.tokens || column >= columns) return;

  int64_t const token = place.row;
  int const* const row_of = pairs.row.of(batch) + token * pairs.choices;
  auto const* const x = gather.x.as<T>(batch);
  T* const y =
      static_cast<T*>(gather.y) + static_cast<int64_t>(batch) * gather.rows.rows * columns + column;
  Part part{};
  bool is_loaded = false;
  for (int first = 0; first < pairs.choices; first += kAtOnce) {
    unsigned row[kAtOnce];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = first + i < pairs.choices ? __ldg(row_of + first + i) : ~0u;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) any |= row[i] < rows;
    if (!any) continue;
    if (!is_loaded) part = Part::load_once(x + token * columns + column);
    is_loaded = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row[i] >= rows) continue;
      Part copy = part;
      if constexpr (kWeighted) {
        copy = part.times(__ldg(pairs.weights.of(batch) + token * pairs.choices + first + i));
      }
      copy.store_streaming(y + static_cast<int64_t>(row[i]) * columns);
    }
  }
}

}  // namespace

cudaError_t dispatch_rows(DispatchArguments const& arguments, cudaStream_t stream) {
  GatherArguments const& gather = arguments.gather;
  return with_type(gather.shape, [&](auto type, auto aligned) {
    using T = typename decltype(type)::type;
    using Part = Vector<T, aligned.value>;
    auto const sharing = Sharing::of(gather.shape.columns / Part::kElements, 128, true);
    int64_t const down = divide_up(arguments.pairs.tokens, sharing.down());
    auto const clearing = static_cast<unsigned>(divide_up(gather.rows.rows, kThreads));
    dim3 grid = sharing.grid(down, gather.shape.batches);
    grid.x += clearing;
    auto const kernel = arguments.pairs.weights.data
                            ? dispatch_rows_kernel<T, aligned.value, true>
                            : dispatch_rows_kernel<T, aligned.value, false>;
    kernel<<<grid, sharing.block(), 0, stream>>>(arguments, sharing, clearing);
    return cudaGetLastError();
  });
}

}  // namespace jgg::rows
