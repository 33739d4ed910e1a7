// Quantises rows in blocks of 1 x 128. Eight threads share a block, two octets each, and take
// several blocks at a time, so that enough loads are in flight to keep the memory busy.
#include "quantize/format.h"
#include "quantize/octet.h"
#include "quantize/scale_rule.h"

namespace jgg::quantize {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;  // threads that share a block of 1 x 128
constexpr int kOctets = kScaleBlock / kOctet / kLanes;
constexpr int kBlocksAtOnce = 2;
constexpr int kBlocksPerWarp = 32 / kLanes * kBlocksAtOnce;

// The places of a thread's octets of one block.
struct Position {
  int64_t offset;  // of the first octet
  int count;       // elements from there to the end of the row, none past the last block

  __device__ __forceinline__ Position(unsigned block, unsigned blocks, unsigned blocks_per_row,
                                      int columns) {
    int const lane = threadIdx.x % kLanes * kOctet;
    if (columns % kScaleBlock == 0) {
      offset = static_cast<int64_t>(block) * kScaleBlock + lane;
      count = kScaleBlock - lane;
    } else {
      unsigned const row = block / blocks_per_row;
      int const column = (block - row * blocks_per_row) * kScaleBlock + lane;
      offset = static_cast<int64_t>(row) * columns + column;
      count = columns - column;
    }
    if (block >= blocks) count = 0;
  }

  // Moves the position to the token that its row is a copy of.
  __device__ __forceinline__ void move_to_token(RowsArguments const& a, unsigned block,
                                                unsigned blocks_per_row) {
    if (count <= 0) return;
    unsigned const row = block / blocks_per_row;
    auto const token = static_cast<unsigned>(__ldg(a.of + row));
    offset += (static_cast<int64_t>(token) - row) * a.columns;
    if (token >= static_cast<unsigned>(a.tokens)) count = 0;
  }
};

template <class Source, ElementType kFormat, bool kAligned, bool kOfTokens>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const __grid_constant__ RowsArguments a, unsigned blocks,
                         unsigned blocks_per_row, bool power_of_two) {
  auto const* const x = static_cast<Source const*>(a.x);
  unsigned const warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  unsigned const first = warp * kBlocksPerWarp + threadIdx.x % 32 / kLanes;

  Octet<Source> octets[kBlocksAtOnce][kOctets];
#pragma unroll
  for (int i = 0; i < kBlocksAtOnce; ++i) {
    unsigned const block = first + i * (32 / kLanes);
    Position at(block, blocks, blocks_per_row, a.columns);
    if constexpr (kOfTokens) at.move_to_token(a, block, blocks_per_row);
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      int const ahead = j * kLanes * kOctet;
      octets[i][j] =
          Octet<Source>::template load<kAligned>(x + at.offset + ahead, at.count - ahead);
    }
  }
#pragma unroll
  for (int i = 0; i < kBlocksAtOnce; ++i) {
    unsigned const block = first + i * (32 / kLanes);
    Position const at(block, blocks, blocks_per_row, a.columns);
    uint32_t largest = 0;
#pragma unroll
    for (auto& octet : octets[i]) {
      largest = Word<Source>::max(largest, octet.largest_after_poisoning());
      octet.stay_packed();
    }
    largest = Word<Source>::max_over(largest, kLanes);
    Scale const s = scale_of<kFormat>(Word<Source>::element(largest, 0), power_of_two);
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      int const ahead = j * kLanes * kOctet;
      auto const scaled = [&](int e) { return octets[i][j][e] * s.inverse; };
      store_bytes<kAligned>(a.q + at.offset + ahead, convert_eight<kFormat>(scaled),
                            at.count - ahead);
    }
    if (threadIdx.x % kLanes == 0 && block < blocks) a.scale[block] = s.scale;
  }
}

}  // namespace

cudaError_t quantize_rows(QuantizeFormat format, RowsArguments const& arguments,
                          cudaStream_t stream) {
  int const blocks_per_row = blocks_of(arguments.columns);
  int64_t const blocks = static_cast<int64_t>(arguments.rows) * blocks_per_row;
  constexpr int kBlocksPerCta = kThreads / 32 * kBlocksPerWarp;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  int const grid = static_cast<int>((blocks + kBlocksPerCta - 1) / kBlocksPerCta);
  bool const is_aligned = arguments.columns % kOctet == 0;
  return with_format(format, is_aligned, [&](auto source, auto fp8, auto aligned) {
    return Flag{arguments.of != nullptr}([&](auto of_tokens) {
      auto const kernel =
          quantize_rows_kernel<SourceOf<source>, fp8.value, aligned.value, of_tokens.value>;
      kernel<<<grid, kThreads, 0, stream>>>(arguments, static_cast<unsigned>(blocks),
                                            blocks_per_row, format.power_of_two);
      return cudaGetLastError();
    });
  });
}

}  // namespace jgg::quantize
