// Warps that load an lhs whose rows lie anywhere in memory.
//
// A TMA box may have a single row. The swizzle places the pieces of the row by bits of their
// address in shared memory. A row therefore lands where the box of a whole tile would have put it,
// and the stage is the same. Such a box is multicast, bounds-checked and counted in bytes like any
// other.
//
// The rate of issue limits such boxes: 128 of them take longer to issue than the products of a K
// tile take. Clusters therefore share the lhs of all their tiles, and each CTA loads half of the
// rows for both CTAs, by two warps that issue a box in about 20 cycles each. The issuing thread has
// to be an elected one. If it is chosen in another way, the compiler does not know that it is a
// single thread, makes a loop over lanes of each instruction, and a box takes 65 cycles.
//
// If a tile has all columns of the result, no other tile has its rows: each CTA then loads its own
// rows, 64 of them by each warp, and clusters share rhs. The steps of FP8 kernels take longer, so
// each CTA loads all of its rows itself: scales/gather.h.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/concepts.h"
#include "sm90/tma/load.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// Warps that load them.
template <class Problem>
constexpr int kGatheringWarps = kGathersLhs<Problem> ? 2 : 0;

// Loads kRows boxes to consecutive rows of shared memory, in each of kCtas CTAs, from the rows of
// memory whose numbers are in shared memory at `rows`. kBatch of these numbers are in registers at
// a time.
template <int kCtas, int kRows = kWarpSize, int kBatch = 16>
__device__ __forceinline__ void load_rows(CUtensorMap const& from, uint32_t rows, uint32_t full,
                                          uint32_t to, int column) {
#pragma unroll
  for (int first = 0; first < kRows; first += kBatch) {
    int row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i += 4) {
      asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(row[i]), "=r"(row[i + 1]), "=r"(row[i + 2]), "=r"(row[i + 3])
                   : "r"(rows + (first + i) * 4)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      load_row<kCtas>(from, full, to + (first + i) * kRowBytes, column, row[i]);
    }
  }
}

// A loading warp, where rows of lhs are rows of the result.
template <class Problem, class Shared>
__device__ void gather_rows(typename Problem::Params const& params, Shared& shared, int rank,
                            int warp) {
  using Config = typename Problem::Config;
  static_assert(GathersLhs<Problem>);
  static_assert(Config::kCluster == Config::kBoxes, "each CTA of a cluster loads a box for all");
  static_assert(kRowsPerConsumer == kGatheringWarps<Problem> * kWarpSize);
  constexpr bool kOwn = kGathersOwnRows<Problem>;
  constexpr int kRows = kOwn ? kRowsPerConsumer : kWarpSize, kCtas = kOwn ? 1 : Config::kCluster;
  int const first_row = warp * kRows;
  uint32_t const rows = cute::cast_smem_ptr_to_uint(&shared.rows[first_row]);
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    int const in_tile = (kOwn ? 0 : rank * kRowsPerConsumer) + first_row;
    int const lane = threadIdx.x % kWarpSize;
    if (work.k_tiles > 0) {
#pragma unroll
      for (int row = lane; row < kRows; row += kWarpSize) {
        int const index = Problem::gathered_index(params, work, work.m + in_tile + row);
        shared.rows[first_row + row] = Problem::gathered_row(params, index);
      }
    }
    __syncwarp();
    if (cute::elect_one_sync()) {
      // A box without rows is not waited for, but nobody may wait for a stage two rounds ahead. The
      // first box of a CTA that loads its own is: of a tile past the group's end too.
      bool const has_rows = kOwn ? warp == 0 || Problem::rows_left(params, work) > first_row
                                 : Problem::rows_left(params, work) > rank * kRowsPerConsumer;
      auto at = stage;
      for (int step = 0; step < work.k_tiles; ++step, ++at) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        if (!has_rows) continue;
        uint32_t const full = cute::cast_smem_ptr_to_uint(shared.full[at.stage].address());
        uint32_t const to = cute::cast_smem_ptr_to_uint(shared.lhs[at.stage]) + in_tile * kRowBytes;
        load_rows<kCtas, kRows>(Problem::gathered(params), rows, full, to, step * Config::kTileK);
      }
    }
    stage += work.k_tiles;
  });
}

// To an address in shared memory, which is one register where a pointer is two.
__device__ inline void store_shared(uint32_t to, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// A loading warp, where rows are contracted: each step has other rows, and each CTA loads its half
// of their columns for both.
template <class Problem, class Shared>
__device__ void gather_contracted_rows(typename Problem::Params const& params, Shared& shared,
                                       int warp) {
  using Config = typename Problem::Config;
  static_assert(GathersLhs<Problem>);
  static_assert(Config::kCluster == Config::kBoxes && kRowsPerConsumer == Config::kSlab);
  static_assert(Config::kTileK == kGatheringWarps<Problem> * kWarpSize);
  // Volatile, so that it is worked out here and takes no register of the consumers.
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  int const first_row = warp * kWarpSize;
  uint32_t const rows = cute::cast_smem_ptr_to_uint(&shared.rows[first_row]);
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    // Query it again at each use, because no register is left to keep it.
    auto const in_tile = [] { return int(rank_in_cluster<Config>()) * kRowsPerConsumer; };
    bool const has_columns = Problem::rows_left(params, work) > in_tile();
    auto const index_of = [&](int step) {
      return Problem::gathered_index(params, work, step * Config::kTileK + first_row + lane);
    };
    int index = work.k_tiles > 0 ? index_of(0) : -1;
    for (int step = 0; step < work.k_tiles; ++step, ++stage) {
      store_shared(rows + lane * sizeof(int), Problem::gathered_row(params, index));
      __syncwarp();
      // It comes from far: nothing is done with it before the rows of this step are on their way.
      index = index_of(step + 1);
      if (cute::elect_one_sync()) {
        shared.empty[stage.stage].wait(stage.phase ^ 1);
        if (has_columns) {
          load_rows<Config::kCluster>(
              Problem::gathered(params), rows,
              cute::cast_smem_ptr_to_uint(shared.full[stage.stage].address()),
              cute::cast_smem_ptr_to_uint(shared.lhs[stage.stage]) +
                  rank_in_cluster<Config>() * Config::kLhsBoxBytes + first_row * kRowBytes,
              work.m + in_tile());
        }
      }
      __syncwarp();
    }
  });
}

}  // namespace jgg::sm90
