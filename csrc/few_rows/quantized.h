// Operands in FP8: matrices [n, k] that are quantised, with a scale for each 128 x 128, and rows of
// 16 bits that are quantised on the way, 128 of K at a time, by the threads that bring them.
//
// A tile's rows are quantised again for each of its columns' tiles. They come from L2, and what
// limits these products is how fast matrices are read. Ada's instruction for FP8, which Hopper
// makes of two for 16 bits whose operands are unpacked before, is fast enough for that.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm89.hpp>
#include <type_traits>

#include "few_rows/matrices.h"
#include "few_rows/sums.h"
#include "quantize/octet.h"
#include "quantize/scale_rule.h"

namespace jgg::few_rows {

template <class Config_>
struct QuantizedOperands {
  using Config = Config_;
  using Source = std::conditional_t<std::is_same_v<typename Config::Element, cutlass::half_t>,
                                    __half, __nv_bfloat16>;
  using Stage = sm90::StageIterator<Config::kStages>;
  static constexpr ElementType kFormat = ElementType::kE4m3;
  static_assert(Config::kTileK == kScaleBlock && Config::kTileN <= kScaleBlock);

  struct Params : few_rows::Params {
    BlockScales scales;
    bool power_of_two;  // of scales of rows
  };

  struct Shared : SharedStorage<Config> {
    alignas(16) float row_scales[Config::kStages][Config::kTileM];
    float box_scales[Config::kStages][Config::kBoxes];
  };

  // By one thread.
  __device__ static void load_matrices(Params const& params, Shared& shared, WorkTile const& work,
                                       Stage& stage) {
    load_boxes<Config>(params, shared, work, stage,
                       [&](auto const& loader, auto const& from, uint8_t* to, int box, int column,
                           int k) { loader.load(from, to, box, false, k, column, work.group); });
  }

  // By each of the threads that bring rows.
  __device__ static void load_rows(Params const& params, Shared& shared, WorkTile const& work,
                                   Stage& stage) {
    if (work.k_tiles == 0) return;
    with_room_for<kMmaRows, Config::kTileM>(uniform(work.extent - work.m), [&](auto blocks) {
      bring<blocks.value * kMmaRows / kRowsAtOnce>(params, shared, work, stage);
    });
  }

  // Where a lane reads in a stage.
  struct Places {
    int column[2];  // of matrices, for the first 32 of K
    int row;        // of the first eight rows, for the same

    __device__ explicit Places(int warp) {
      int const lane = threadIdx.x % kWarpSize;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Run<Config> const run(warp, i);
        int const in_box = run.column + lane % 16;
        column[i] = run.box * Config::kBoxBytes + in_box * kRowBytes + (lane / 16 ^ lane % 8) * 16;
      }
      row = lane % 8 * kRowBytes + (lane / 8 % 2 ^ lane % 8) * 16;
    }
  };

  // Adds a stage's product with the first kBlocks eights of a tile's rows, times both scales.
  template <int kBlocks>
  __device__ __forceinline__ static void add(Shared const& shared, int stage, Places const& places,
                                             Sums<kBlocks>& sums) {
    uint8_t const* const matrices = shared.matrices[stage];
    uint8_t const* const rows = shared.rows[stage];
    Sums<kBlocks> products = {};
    // Registers are left for operands of two steps, and with all rows for those of one.
    constexpr int kAtOnce = kBlocks < 4 ? 2 : 1;
#pragma unroll kAtOnce
    for (int k = 0; k < Config::kTileK; k += kMmaK) {
      uint32_t b[kBlocks][2];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint8_t const* const at = rows + (places.row ^ k) + block * kMmaRows * kRowBytes;
        cute::SM75_U32x2_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(at), b[block][0],
                                      b[block][1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        uint8_t const* const at = matrices + (places.column[i] ^ k);
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(at), a[0], a[1],
                                      a[2], a[3]);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          float (&d)[4] = products[i][block];
          cute::SM89_16x8x32_F32E4M3E4M3F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3],
                                                    b[block][0], b[block][1], d[0], d[1], d[2],
                                                    d[3]);
        }
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float2 const of_rows = *reinterpret_cast<float2 const*>(
          &shared.row_scales[stage][block * kMmaRows + lane_row()]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const of_box = shared.box_scales[stage][i];
        float const even = of_rows.x * of_box, odd = of_rows.y * of_box;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[i][block][j] = fmaf(products[i][block][j], j % 2 ? odd : even, sums[i][block][j]);
        }
      }
    }
  }

 private:
  static constexpr int kMmaK = 32;
  using Octet = quantize::Octet<Source>;
  using Words = quantize::Word<Source>;

  // Sixteen threads have the 128 numbers of a row that share a scale.
  static constexpr int kLanes = kScaleBlock / quantize::kOctet;
  static constexpr int kRowsAtOnce = kRowThreads / kLanes;
  static constexpr int kMostOwn = Config::kTileM / kRowsAtOnce;

  // Each thread keeps kMostOwn octets in flight: of kOwn rows, of as many steps ahead as that is.
  template <int kOwn>
  __device__ static void bring(Params const& params, Shared& shared, WorkTile const& work,
                               Stage& stage) {
    constexpr int kAhead = kMostOwn / kOwn;
    int const thread = threadIdx.x % kRowThreads, lane = thread % kLanes;
    int const first = thread / kLanes, rows = min(work.extent - work.m, Config::kTileM);

    unsigned tokens[kOwn];  // out of range: zeros
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int const row = first + i * kRowsAtOnce;
      tokens[i] = row < rows ? params.token(work.begin + work.m + row) : ~0u;
    }
    int const column = thread == 0 || !Config::kHasUp ? work.n : work.n + params.up_column;
    float const* const box_scales = params.scales.data + work.group * params.scales.group_stride +
                                    column / kScaleBlock * params.scales.column_block_stride;

    Octet octets[kAhead][kOwn];
    float scales[kAhead];
    // Every place is written, or what was there before the tile would have to be kept.
    auto const ask = [&](int place, int step) {
      bool const is_step = step < work.k_tiles;
      bool const exists = is_step && step * kScaleBlock + lane * quantize::kOctet < params.k;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        uint4 words{};
        if (exists && tokens[i] < static_cast<unsigned>(params.tokens)) {
          Source const* const row =
              reinterpret_cast<Source const*>(params.x) + int64_t(tokens[i]) * params.k;
          words = __ldg(reinterpret_cast<uint4 const*>(row + step * kScaleBlock) + lane);
        }
        octets[place][i] = Octet{{words.x, words.y, words.z, words.w}};
      }
      scales[place] = is_step && thread < Config::kBoxes ? __ldg(box_scales + step) : 0.0f;
    };
#pragma unroll
    for (int place = 0; place < kAhead; ++place) ask(place, place);
#pragma unroll 1
    for (int start = 0; start < work.k_tiles; start += kAhead) {
#pragma unroll
      for (int place = 0; place < kAhead; ++place) {
        int const step = start + place;
        if (step >= work.k_tiles) continue;
        shared.empty[stage.stage].wait(stage.phase ^ 1);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          put(shared, stage.stage, octets[place][i], first + i * kRowsAtOnce, rows, lane,
              params.power_of_two);
        }
        if (thread < Config::kBoxes) shared.box_scales[stage.stage][thread] = scales[place];
        // CUTLASS's arrival at a barrier does not keep the compiler from moving these past it.
        asm volatile("" ::: "memory");
        shared.full[stage.stage].arrive();
        ask(place, step + kAhead);
        ++stage;
      }
    }
  }

  // Quantises what a thread has of a row, which the rest of its kLanes threads have the rest of.
  __device__ static void put(Shared& shared, int stage, Octet octet, int row, int rows, int lane,
                             bool power_of_two) {
    uint32_t const largest = Words::max_over(octet.largest_after_poisoning(), kLanes);
    quantize::Scale const scale =
        quantize::scale_of<kFormat>(Words::element(largest, 0), power_of_two);
    if (row >= rows) return;
    uint2 const q =
        quantize::convert_eight<kFormat>([&](int i) { return octet[i] * scale.inverse; });
    int const piece = lane / 2 ^ row % 8;
    *reinterpret_cast<uint2*>(&shared.rows[stage][row * kRowBytes + piece * 16 + lane % 2 * 8]) = q;
    if (lane == 0) shared.row_scales[stage][row] = scale.scale;
  }
};

}  // namespace jgg::few_rows
