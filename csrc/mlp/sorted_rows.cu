// Each thread block sorts all pairs, so that no block waits for another. Eight threads quantise a
// block of 1 x 128 of the token of one pair, 16 columns each. A token is quantised once for each of
// its pairs: its values then come from L2 while the pairs are sorted.
#include "few_rows/sizes.h"
#include "mlp/sorted_rows.h"
#include "quantize/octet.h"
#include "quantize/scale_rule.h"
#include "scheduler/ceil_div.h"
#include "sm90/dependent_launch.h"

namespace jgg::mlp {
namespace {

using quantize::kOctet;
using quantize::Octet;
using quantize::Scale;

using Source = __nv_bfloat16;

constexpr ElementType kFp8 = ElementType::kE4m3;

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // threads to a block of columns
constexpr int kOctets = kScaleBlock / kOctet / kLanes;
constexpr int kBlocksPerCta = kThreads / kLanes;

__global__ void __launch_bounds__(kThreads)
    quantize_sorted_kernel(const __grid_constant__ SortedRows a) {
  __shared__ few_rows::Groups shared;
  __shared__ int place_of[Pairs::kMost];
  sm90::let_next_begin();
  int const blocks = ceil_div(a.columns, kScaleBlock);
  int const index = blockIdx.x * kBlocksPerCta + threadIdx.x / kLanes, pair = index / blocks;
  int const block = index - pair * blocks;
  int const column = block * kScaleBlock + threadIdx.x % kLanes * kOctet;
  bool const exists = pair < a.pairs;
  int const count = exists ? a.columns - column : 0;
  auto const ahead = [](int octet) { return octet * kLanes * kOctet; };

  // Load before sorting, because neither depends on the other.
  Octet<Source> octets[kOctets];
  auto const* const from =
      static_cast<Source const*>(a.x) + int64_t{1} * (pair / a.choices) * a.columns + column;
#pragma unroll
  for (int j = 0; j < kOctets; ++j) {
    octets[j] = Octet<Source>::template load<true>(from + ahead(j), count - ahead(j));
  }
  if (threadIdx.x < kWarpSize) {
    few_rows::place_pairs(a.group_of, a.pairs, a.groups, shared,
                          [&](int pair, int place) { place_of[pair] = place; });
  }

  Scale const s = quantize::scale_of_octets<kFp8, kLanes>(octets, a.power_of_two);
  __syncthreads();
  if (exists) {
    int64_t const row = place_of[pair];
    uint8_t* const to = a.q + row * a.columns + column;
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      auto const scaled = [&](int e) { return octets[j][e] * s.inverse; };
      quantize::store_bytes<true>(to + ahead(j), quantize::convert_eight<kFp8>(scaled),
                                  count - ahead(j));
    }
    if (threadIdx.x % kLanes == 0) a.scale[row * blocks + block] = s.scale;
  }
  if (blockIdx.x > 0) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.groups; i += kThreads) a.sizes[i] = shared.sizes[i];
  static_assert(Pairs::kMost <= kThreads);
  if (int const i = threadIdx.x; i < a.pairs) {
    a.places[i] = place_of[i];
    a.row_weights[place_of[i]] = __ldg(a.weights + i);
  }
}

}  // namespace

cudaError_t quantize_sorted(SortedRows const& arguments, cudaStream_t stream) {
  int const blocks = arguments.pairs * ceil_div(arguments.columns, kScaleBlock);
  quantize_sorted_kernel<<<ceil_div(blocks, kBlocksPerCta), kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace jgg::mlp
