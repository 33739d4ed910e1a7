// Finds the largest magnitude of each column in some rows. The scale of the column follows from
// this magnitude.
#include "quantize/format.h"
#include "quantize/octet.h"

namespace jgg::quantize {
namespace {

constexpr int kThreads = 256;
constexpr int kAcross = 16;  // threads side by side, an octet each
constexpr int kDown = kThreads / kAcross;
constexpr int kAtOnce = 4;  // rows of which a thread has loads in flight
static_assert(kColumnRows % (kDown * kAtOnce) == 0);

template <class Source, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    column_maxima_kernel(ColumnsArguments arguments, TileGrid grid) {
  using Words = Word<Source>;
  using Row = Octet<Source>;
  __shared__ uint32_t shared[kDown][kAcross][Row::kWords + 1];
  int const across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  TileGrid::Place const place = grid.place();
  int const column = (place.across * kAcross + across) * kOctet;
  int const left = arguments.columns - column;
  int const chunk = place.down * kColumnRows;
  int const begin = max(chunk, __ldg(arguments.window));
  int const end = min(min(chunk + kColumnRows, arguments.rows), __ldg(arguments.window + 1));
  auto const* const x = static_cast<Source const*>(arguments.x) + column;
  uint32_t largest[Row::kWords] = {};
  for (int first = chunk + down; first < end; first += kDown * kAtOnce) {
    Row rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = first + i * kDown;
      int const count = row >= begin && row < end ? left : 0;
      rows[i] =
          Row::template load<kAligned>(x + static_cast<int64_t>(row) * arguments.columns, count);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int w = 0; w < Row::kWords; ++w) {
        uint32_t magnitude = Words::magnitude(rows[i].word[w]);
        if (Words::any_infinite(magnitude)) magnitude = Words::poison(magnitude);
        largest[w] = Words::max(largest[w], magnitude);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < Row::kWords; ++w) shared[down][across][w] = largest[w];
  __syncthreads();
  int const mine = threadIdx.x / kOctet, element = threadIdx.x % kOctet;
  if (mine >= kAcross) return;
  int const word = element / Words::kElements;
  uint32_t result = 0;
  for (int i = 0; i < kDown; ++i) result = Words::max(result, shared[i][mine][word]);
  int const to = (place.across * kAcross + mine) * kOctet + element;
  if (to < arguments.columns) {
    arguments.maxima[static_cast<int64_t>(place.down) * arguments.columns + to] =
        Words::element(result, element);
  }
}

}  // namespace

cudaError_t column_maxima(ElementType source, ColumnsArguments const& arguments,
                          cudaStream_t stream) {
  TileGrid const grid{unsigned(ceil_div(arguments.columns, kAcross * kOctet)),
                      unsigned(ceil_div(arguments.rows, kColumnRows))};
  return with_constants(
      [&](auto type, auto aligned) {
        column_maxima_kernel<SourceOf<type>, aligned.value>
            <<<grid.blocks(), kThreads, 0, stream>>>(arguments, grid);
        return cudaGetLastError();
      },
      OneOf<ElementType::kBf16, ElementType::kF16, ElementType::kF32>{source},
      Flag{arguments.columns % kOctet == 0});
}

}  // namespace jgg::quantize
