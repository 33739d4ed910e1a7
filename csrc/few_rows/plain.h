// Operands of 16 bits, multiplied as they are: matrices [k, n] come by TMA, rows by threads, since
// no TMA box has rows of any tokens.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <type_traits>

#include "few_rows/matrices.h"
#include "few_rows/sums.h"

namespace jgg::few_rows {

template <class Config_>
struct PlainOperands {
  using Config = Config_;
  using Element = typename Config::Element;
  using Params = few_rows::Params;
  using Shared = SharedStorage<Config>;
  using Stage = sm90::StageIterator<Config::kStages>;

  // By one thread.
  __device__ static void load_matrices(Params const& params, Shared& shared, WorkTile const& work,
                                       Stage& stage) {
    load_boxes<Config>(params, shared, work, stage,
                       [&](auto const& loader, auto const& from, uint8_t* to, int box, int column,
                           int k) { loader.load(from, to, box, false, column, k, work.group); });
  }

  // By each of the threads that bring rows. A row's 128 bytes of a stage are eight pieces, swizzled
  // so that eight rows of a piece are read from all banks. Rows that a tile does not have are left
  // as they are, and only reach rows of the result that are not stored.
  __device__ static void load_rows(Params const& params, Shared& shared, WorkTile const& work,
                                   Stage& stage) {
    constexpr int kPieces = kRowBytes / 16, kElements = 16 / sizeof(Element);
    constexpr int kRowsAtOnce = kRowThreads / kPieces;
    constexpr int kOwn = Config::kTileM / kRowsAtOnce;
    if (work.k_tiles == 0) return;
    int const thread = threadIdx.x % kRowThreads, piece = thread % kPieces;
    int const first = thread / kPieces, rows = min(work.extent - work.m, Config::kTileM);

    char const* from[kOwn];  // null: zeros
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int const row = first + i * kRowsAtOnce;
      from[i] = nullptr;
      if (row >= rows) continue;
      unsigned const token = params.token(work.begin + work.m + row);
      if (token >= static_cast<unsigned>(params.tokens)) continue;
      from[i] =
          params.x + (int64_t(token) * params.k + piece * kElements) * int64_t(sizeof(Element));
    }
    // Rows are eight apart, so the swizzle is the same for all of a thread's.
    int const place = first * kRowBytes + (piece ^ first % kPieces) * 16;
    for (int step = 0; step < work.k_tiles; ++step, ++stage) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      uint8_t* const to = shared.rows[stage.stage] + place;
      bool const exists = step * Config::kTileK + piece * kElements < params.k;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (first + i * kRowsAtOnce >= rows) break;
        bool const reads = exists && from[i];
        char const* const source = reads ? from[i] + int64_t(step) * kRowBytes : params.x;
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(source),
            *reinterpret_cast<cute::uint128_t*>(to + i * kRowsAtOnce * kRowBytes), reads);
      }
      cutlass::arch::cpasync_barrier_arrive_noinc(shared.full[stage.stage].address());
    }
  }

  // Where a lane reads in a stage.
  struct Places {
    int column[2];  // of matrices, for the first 16 of K
    int row;        // of the first eight rows, for the first 32 of K

    __device__ explicit Places(int warp) {
      int const lane = threadIdx.x % kWarpSize, k = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Run<Config> const run(warp, i);
        int const piece = run.column / 8 + lane / 8 % 2;
        column[i] = run.box * Config::kBoxBytes + k * kRowBytes + (piece ^ lane % 8) * 16;
      }
      row = lane % 8 * kRowBytes + (lane / 8 ^ lane % 8) * 16;
    }
  };

  // Adds a stage's product with the first kBlocks eights of a tile's rows.
  template <int kBlocks>
  __device__ __forceinline__ static void add(Shared const& shared, int stage, Places const& places,
                                             Sums<kBlocks>& sums) {
    constexpr int kMmaK = 16;
    uint8_t const* const matrices = shared.matrices[stage];
    uint8_t const* const rows = shared.rows[stage];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[kBlocks][4];
      load_halves<kBlocks>(rows, places.row, half, b);
#pragma unroll
      for (int quarter = 0; quarter < 2; ++quarter) {
        int const k = (2 * half + quarter) * kMmaK;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          uint8_t const* const at = matrices + places.column[i] + k * kRowBytes;
          cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(at), a[0], a[1],
                                        a[2], a[3]);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            multiply_add(sums[i][block], a, b[block][2 * quarter], b[block][2 * quarter + 1]);
          }
        }
      }
    }
  }

 private:
  __device__ static void multiply_add(float (&sums)[4], uint32_t const (&a)[4], uint32_t b0,
                                      uint32_t b1) {
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                   cute::SM80_16x8x16_F32F16F16F32_TN,
                                   cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    Mma::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b0, b1, sums[0], sums[1],
             sums[2], sums[3]);
  }
};

}  // namespace jgg::few_rows
