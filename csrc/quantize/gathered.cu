// Copies tokens to the rows of their experts, transposed and quantised, as weight gradients read
// them. One pass does all of this. A copy that is followed by a quantiser would write and read
// 16-bit rows in between.
//
// Each column of the tokens has one scale, so that a token has the same FP8 values in every row,
// and a block can be written without first looking for its largest magnitude. If tokens are copied
// several times, an earlier kernel quantises each token once, and the kernel that copies only moves
// bytes. The kernel that copies writes all blocks of some columns before other columns, so that
// these columns of the tokens stay in L2.
#include <algorithm>

#include "multiprocessors.h"
#include "quantize/format.h"
#include "quantize/octet.h"
#include "quantize/row_blocks.h"
#include "quantize/scale_rule.h"

namespace jgg::quantize {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceColumns = sizeof(uint4);  // of a token that a thread moves at once
constexpr int kAcross = kScaleBlock / kPieceColumns;
constexpr int kDown = kThreads / kAcross;
constexpr int kRows = kScaleBlock / kDown;  // of a thread: one for each byte of a word
static_assert(kRows == sizeof(uint32_t));
constexpr int kTilesPerCta = 2;
// A launch has at least this many thread blocks on a multiprocessor, if there are enough tiles.
constexpr int kCtasPerMultiprocessor = 5;

// The inverses of the scales of consecutive columns, zero past the last column.
template <int kCount>
struct Inverses {
  float of[kCount];
  __device__ __forceinline__ Inverses(float const* scale, int left) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = i < left ? __frcp_rn(__ldg(scale + i)) : 0.0f;
  }
};

template <ElementType kFormat, class Source>
__device__ __forceinline__ uint2 quantized(Octet<Source>& octet, float const* inverse) {
  octet.largest_after_poisoning();
  return convert_eight<kFormat>([&](int i) { return octet[i] * inverse[i]; });
}

// Tokens in FP8, in rows of `pitch` bytes.
struct QuantizedTokens {
  static constexpr int kCtas = 6;
  uint8_t const* q;
  int pitch;

  __device__ __forceinline__ auto columns(int column) const {
    return [=, *this](int token) {
      return *reinterpret_cast<uint4 const*>(q + static_cast<int64_t>(token) * pitch + column);
    };
  }
};

// Tokens that each thread quantises after it has loaded them.
template <class Source, ElementType kFormat, bool kAligned>
struct SourceTokens {
  static constexpr int kCtas = 3;
  Source const* x;
  float const* scale;
  int pitch;

  __device__ __forceinline__ auto columns(int column) const {
    Inverses<kPieceColumns> const inverses(scale + column, pitch - column);
    return [=, *this](int token) {
      uint2 halves[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const first = column + half * kOctet;
        auto octet = Octet<Source>::template load<kAligned>(
            x + static_cast<int64_t>(token) * pitch + first, pitch - first);
        halves[half] = quantized<kFormat>(octet, inverses.of + half * kOctet);
      }
      return uint4{halves[0].x, halves[0].y, halves[1].x, halves[1].y};
    };
  }
};

// The transpose of a tile in shared memory, which threads write in words and read in whole rows of
// 128 bytes. Word w of a row is at w ^ (4 * (row / 16)). The threads of a warp, which write four
// words in each of eight rows at a time, therefore reach all banks, and quads of words stay
// together.
struct Transpose {
  uint32_t word[kScaleBlock][kScaleBlock / kRows];

  // Writes a thread's pieces of four rows of the tile.
  __device__ __forceinline__ void put(uint4 const (&rows)[kRows], int across, int down) {
    uint32_t* const to = &word[across * kPieceColumns][down ^ (4 * across)];
    put(to, rows[0].x, rows[1].x, rows[2].x, rows[3].x, 0);
    put(to, rows[0].y, rows[1].y, rows[2].y, rows[3].y, 4);
    put(to, rows[0].z, rows[1].z, rows[2].z, rows[3].z, 8);
    put(to, rows[0].w, rows[1].w, rows[2].w, rows[3].w, 12);
  }

  // Stores the first `columns` rows of the transpose. Call it after a barrier.
  __device__ __forceinline__ void store(uint8_t* q_t, int columns) const {
    int const quad = threadIdx.x % kAcross;
#pragma unroll
    for (int row = threadIdx.x / kAcross; row < kScaleBlock; row += kDown) {
      if (row >= columns) break;
      auto const* const from =
          reinterpret_cast<uint4 const*>(&word[row][4 * (quad ^ (row / kPieceColumns))]);
      // The stores are streaming, because nothing is read from the result before all of it is
      // written.
      __stcs(reinterpret_cast<uint4*>(q_t + row * kScaleBlock) + quad, *from);
    }
  }

 private:
  // Transposes four columns of four rows, from `column` of the piece on.
  __device__ __forceinline__ static void put(uint32_t* to, uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d, int column) {
    uint32_t const ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    uint32_t const ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    constexpr int kPitch = kScaleBlock / kRows;
    to[(column + 0) * kPitch] = __byte_perm(ab, cd, 0x5410);
    to[(column + 1) * kPitch] = __byte_perm(ab, cd, 0x7632);
    to[(column + 2) * kPitch] = __byte_perm(ab_high, cd_high, 0x5410);
    to[(column + 3) * kPitch] = __byte_perm(ab_high, cd_high, 0x7632);
  }
};

template <class Tokens>
__global__ void __launch_bounds__(kThreads, Tokens::kCtas)
    transpose_gathered_kernel(GatheredArguments arguments, Tokens tokens, TileGrid grid,
                              int tiles_per_cta) {
  __shared__ Transpose transpose;
  int const columns = arguments.columns;
  TileGrid::Place const place = grid.place();
  int const row_block = place.across;
  RowBlock const block =
      find_block(arguments.group_sizes, arguments.groups, arguments.rows, row_block);
  if (!block.grouped) return;  // no product reads such a block
  int const across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  int token[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    int const row = down * kRows + i;
    token[i] = row < block.rows ? __ldg(arguments.row_of + block.first + row) : -1;
    if (token[i] >= arguments.tokens) token[i] = -1;
  }
  int column = place.down * tiles_per_cta * kScaleBlock;
  int const end = min(column + tiles_per_cta * kScaleBlock, columns);
#pragma unroll 1
  for (; column < end; column += kScaleBlock) {
    int const mine = column + across * kPieceColumns;
    uint4 piece[kRows] = {};
    if (mine < columns) {
      auto const load = tokens.columns(mine);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (token[i] >= 0) piece[i] = load(token[i]);
      }
    }
    transpose.put(piece, across, down);
    __syncthreads();
    transpose.store(
        arguments.q_t + (static_cast<int64_t>(row_block) * columns + column) * kScaleBlock,
        columns - column);
    __syncthreads();
  }
}

constexpr int kOctetsAcross = 32, kRowsAtOnce = 4;  // rows that a thread loads at once
constexpr int kRowsPerCta = 64;

// Quantises tokens to FP8 with a scale for each column.
template <class Source, ElementType kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantize_columns_kernel(GatheredArguments arguments, TileGrid grid) {
  constexpr int kStep = kThreads / kOctetsAcross;
  TileGrid::Place const place = grid.place();
  int const column = (place.across * kOctetsAcross + threadIdx.x % kOctetsAcross) * kOctet;
  int const left = arguments.columns - column, pitch = arguments.quantized_pitch();
  if (column >= pitch) return;
  Inverses<kOctet> const inverses(arguments.scale + column, left);
  auto const* const x = static_cast<Source const*>(arguments.x) + column;
  int row = place.down * kRowsPerCta + threadIdx.x / kOctetsAcross;
  int const end = min((place.down + 1) * kRowsPerCta, arguments.tokens);
  for (; row < end; row += kStep * kRowsAtOnce) {
    Octet<Source> octets[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      int const from = row + i * kStep;
      octets[i] = Octet<Source>::template load<kAligned>(
          x + static_cast<int64_t>(from) * arguments.columns, from < end ? left : 0);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      int64_t const to = row + i * kStep;
      if (to < end) {
        *reinterpret_cast<uint2*>(arguments.quantized + to * pitch + column) =
            quantized<kFormat>(octets[i], inverses.of);
      }
    }
  }
}

}  // namespace

cudaError_t quantize_gathered(QuantizeFormat format, GatheredArguments const& arguments,
                              cudaStream_t stream) {
  auto const& a = arguments;
  int multiprocessors;
  cudaError_t const counted = count_multiprocessors(multiprocessors);
  if (counted != cudaSuccess) return counted;
  int const least_ctas = kCtasPerMultiprocessor * multiprocessors;
  int const tiles = blocks_of(a.columns);
  int64_t const all_tiles = static_cast<int64_t>(tiles) * a.row_blocks;
  int const tiles_per_cta =
      static_cast<int>(std::clamp<int64_t>(all_tiles / least_ctas, 1, kTilesPerCta));
  TileGrid const grid{unsigned(a.row_blocks), unsigned(ceil_div(tiles, tiles_per_cta))};
  cudaError_t const status =
      with_format(format, a.columns % kOctet == 0, [&](auto source, auto fp8, auto aligned) {
        using Source = SourceOf<source>;
        if (a.quantized == nullptr) {
          using Tokens = SourceTokens<Source, fp8.value, aligned.value>;
          transpose_gathered_kernel<<<grid.blocks(), kThreads, 0, stream>>>(
              a, Tokens{static_cast<Source const*>(a.x), a.scale, a.columns}, grid, tiles_per_cta);
        } else {
          TileGrid const ctas{unsigned(ceil_div(a.quantized_pitch(), kOctetsAcross * kOctet)),
                              unsigned(ceil_div(a.tokens, kRowsPerCta))};
          quantize_columns_kernel<Source, fp8.value, aligned.value>
              <<<ctas.blocks(), kThreads, 0, stream>>>(a, ctas);
        }
        return cudaGetLastError();
      });
  if (status != cudaSuccess || a.quantized == nullptr) return status;
  transpose_gathered_kernel<<<grid.blocks(), kThreads, 0, stream>>>(
      a, QuantizedTokens{a.quantized, a.quantized_pitch()}, grid, tiles_per_cta);
  return cudaGetLastError();
}

}  // namespace jgg::quantize
