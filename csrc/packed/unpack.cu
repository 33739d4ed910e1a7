// Unpacks matrices to arrays of bfloat16. Each block loads a few consecutive records of a strip
// along K, all at once, and transposes them in shared memory.
#include <cutlass/numeric_types.h>

#include <cute/arch/copy_sm90.hpp>

#include "dispatch.h"
#include "packed/params.h"
#include "tile_grid.h"

namespace jgg::packed {
namespace {

constexpr int kThreads = 128;
constexpr int kRecords = 4;  // of a block
constexpr int kLineBytes = kSide * 2;
constexpr int kPieces = kLineBytes / 16;

struct UnpackParams {
  Matrices packed;
  int group_shift;
  uint16_t* out;
  int k;
  int n;
  TileGrid grid;  // tiles are kRecords records of a strip; 2^31 tiles would be 4 TB or more
};

// Returns two decoded numbers of a column times its scale, rounded.
template <Format kFormat>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
  constexpr float kFactor = is_int4(kFormat) ? 1.0f : factor_of(kFormat);
  float const low = kFactor * __uint_as_float(pair << 16);
  float const high = kFactor * __uint_as_float(pair & 0xFFFF0000);
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high * scale), "f"(low * scale));
  return both;
}

template <Format kFormat>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ UnpackParams params) {
  constexpr bool kInBlocks = kFormat == Format::kFp8Blocks;
  // int4 and FP8 in blocks are decoded without scales, so that results have the bits of float32
  // products.
  using Of = Record<kInBlocks ? Format::kFp8 : kFormat>;
  constexpr int kSlotBytes = Record<kFormat>::kSlotBytes;
  __shared__ alignas(128) uint8_t lines[kRecords][kSide][kLineBytes];
  TileGrid::Place const place = params.grid.place();
  int const records = (params.k + kSide - 1) / kSide;
  int const first = place.across * kRecords, count = min(records - first, kRecords);
  int const thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int64_t const strip = int64_t(place.matrix) * params.grid.down + place.down;

  int const shift = params.group_shift;
  int64_t const slots = is_int4(kFormat) ? (2 * records + (1 << shift) - 1) >> shift : records;
  int const slot = is_int4(kFormat) ? 2 * first >> shift : first;
  uint8_t const* const values =
      params.packed.values + (strip * records + first) * record_bytes(kFormat);
  uint8_t const* const scales = params.packed.scales + (strip * slots + slot) * kSlotBytes;
  uint8_t const* const zeros =
      params.packed.zero_points + (strip * slots + slot) * (kSlotBytes / 2);
  float channel[2] = {1.0f, 1.0f};
  if constexpr (!is_int4(kFormat) && !kInBlocks) {
    float const* const of_strip = params.packed.channel_scales + strip * kSide;
#pragma unroll
    for (int i = 0; i < 2; ++i) channel[i] = __ldg(of_strip + warp * 16 + lane / 4 + i * 8);
  }

  // Lane l gives the address of line l % 8 of a fragment of 8 columns by 8 elements of K.
  auto const write = [&](int record, int step, Fragment const& a) {
    int const k = step * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    Fragment b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = scaled<kFormat>(a[i], channel[i % 2]);
    auto& to = *reinterpret_cast<cute::uint128_t*>(&lines[record][k][(piece ^ k % 8) * 16]);
    cute::SM90_U16x8_STSM_T::copy(b[0], b[1], b[2], b[3], to);
  };
#pragma unroll
  for (int record = 0; record < kRecords; ++record) {
    if (record >= count) break;
    if constexpr (kInBlocks) {
      channel[0] = channel[1] = reinterpret_cast<BlockScale const*>(scales)[record].scale;
    }
    Of const of(values, scales, zeros, record, thread, params.group_shift);
    auto const step = [&](auto k) {
      constexpr int kStep = decltype(k)::value;
      Fragment a;
      if constexpr (is_int4(kFormat)) {
        int const at = Of::place_of_group(record, kStep / 2, thread, params.group_shift);
        uint32_t const pair = *reinterpret_cast<uint32_t const*>(scales + at);
        channel[0] = __uint_as_float(pair << 16);
        channel[1] = __uint_as_float(pair & 0xFFFF0000);
        of.template decode_codes<kStep>(a);
      } else {
        of.template decode<kStep>(a);
      }
      write(record, kStep, a);
    };
    step(cute::Int<0>{});
    step(cute::Int<1>{});
    step(cute::Int<2>{});
    step(cute::Int<3>{});
  }
  __syncthreads();

  int const piece = thread % kPieces, column = place.down * kSide + piece * 8;
  bool const in_vectors = params.n % 8 == 0;
  if (column >= params.n) return;
  for (int line = thread / kPieces; line < count * kSide; line += kThreads / kPieces) {
    int const k = first * kSide + line;
    if (k >= params.k) return;
    uint4 const eight = *reinterpret_cast<uint4 const*>(
        &lines[line / kSide][line % kSide][(piece ^ line % 8) * 16]);
    uint16_t* const to = params.out + (int64_t(place.matrix) * params.k + k) * params.n + column;
    if (in_vectors) {
      __stcs(reinterpret_cast<uint4*>(to), eight);
    } else {
      uint32_t const words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i < params.n) to[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      }
    }
  }
}

}  // namespace

cudaError_t unpack(UnpackArguments const& a, cudaStream_t stream) {
  TileGrid const grid{unsigned(ceil_div(ceil_div(a.k, kSide), kRecords)),
                      unsigned(ceil_div(a.n, kSide))};
  UnpackParams const params{
      a.packed, shift_of(a.group_size), static_cast<uint16_t*>(a.out), a.k, a.n, grid};
  return with_constants(
      [&](auto format) {
        unpack_kernel<format.value><<<grid.blocks(a.matrices), kThreads, 0, stream>>>(params);
        return cudaGetLastError();
      },
      OneOf<Format::kMxFp4, Format::kInt4, Format::kInt4Zeros, Format::kInt8, Format::kFp8,
            Format::kFp8Blocks>{compiled_format(a.format, a.packed)});
}

}  // namespace jgg::packed
