// Warps that load an lhs whose rows lie anywhere in memory.
//
// A TMA box may have a single row. The swizzle places the 16-byte units of the row by bits of their
// address in shared memory. A row therefore lands where the box of a whole tile would have put it,
// so consumers read the stage in the same way. Such a box is multicast, bounds-checked and counted
// in bytes like any other.
//
// Issuing such a box takes about 20 cycles. Two warps therefore take longer to issue 128 of them
// than the products of a K tile take. Kernels avoid this in two ways. Either clusters share the lhs
// of all their tiles, and two warps of each CTA load half of the rows for both CTAs. Or clusters
// share rhs, and three warps load all rows of their CTA. Kernels whose rows are contracted and FP8
// kernels (scales/gather.h) always do the latter.
//
// elect_one_sync() has to choose the issuing thread. If the thread is chosen in another way, the
// compiler does not know that it is a single thread. It then makes a loop over lanes of each
// instruction, and a box takes 65 cycles.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/concepts.h"
#include "sm90/tma/load.h"
#include "sm90/work.h"

namespace jgg::sm90 {

// The number of warps that load rows of lhs and nothing else.
template <class Problem>
constexpr int kGatheringWarps = kGathersLhs<Problem> ? 2 : 0;

// Reads the numbers of rows from an address in shared memory.
template <int kRows>
__device__ __forceinline__ void read_rows(uint32_t from, int (&row)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(row[i]), "=r"(row[i + 1]), "=r"(row[i + 2]), "=r"(row[i + 3])
                 : "r"(from + i * 4)
                 : "memory");
  }
}

// Loads kRows boxes to consecutive rows of shared memory, in each of kCtas CTAs, from the rows of
// memory whose numbers are in shared memory at `rows`. kBatch of these numbers are in registers at
// a time.
template <int kCtas, int kRows = kWarpSize, int kBatch = 16>
__device__ __forceinline__ void load_rows(CUtensorMap const& from, uint32_t rows, uint32_t full,
                                          uint32_t to, int column) {
#pragma unroll
  for (int first = 0; first < kRows; first += kBatch) {
    int row[kBatch];
    read_rows(rows + first * sizeof(int), row);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      load_row<kCtas>(from, full, to + (first + i) * kRowBytes, column, row[i]);
    }
  }
}

// Loads kRows boxes as load_rows() does, from `column` on, and as many boxes of the same rows from
// `second_column` on.
template <int kRows>
__device__ __forceinline__ void load_rows_twice(CUtensorMap const& from, uint32_t rows,
                                                uint32_t full, uint32_t to, uint32_t second_to,
                                                int column, int second_column) {
  constexpr int kBatch = 8;
  static_assert(kRows % kBatch == 0);
#pragma unroll
  for (int first = 0; first < kRows; first += kBatch) {
    int row[kBatch];
    read_rows(rows + first * sizeof(int), row);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      load_row<1>(from, full, to + (first + i) * kRowBytes, column, row[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      load_row<1>(from, full, second_to + (first + i) * kRowBytes, second_column, row[i]);
    }
  }
}

// The work of a loading warp if rows of lhs are rows of the result.
template <class Problem, class Shared>
__device__ void gather_rows(typename Problem::Params const& params, Shared& shared, int rank,
                            int warp) {
  using Config = typename Problem::Config;
  static_assert(GathersLhs<Problem>);
  static_assert(Config::kCluster == Config::kBoxes, "each CTA of a cluster loads a box for all");
  static_assert(kRowsPerConsumer == kGatheringWarps<Problem> * kWarpSize);
  int const first_row = warp * kWarpSize;
  uint32_t const rows = cute::cast_smem_ptr_to_uint(&shared.rows[first_row]);
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    int const in_tile = rank * kRowsPerConsumer + first_row;
    int const lane = threadIdx.x % kWarpSize;
    if (work.k_tiles > 0) {
      int const index = Problem::gathered_index(params, work, work.m + in_tile + lane);
      shared.rows[first_row + lane] = Problem::gathered_row(params, index);
    }
    __syncwarp();
    if (cute::elect_one_sync()) {
      // Wait for each stage even if it gets no rows, because no thread may wait for a stage two
      // rounds ahead.
      bool const has_rows = Problem::rows_left(params, work) > rank * kRowsPerConsumer;
      auto at = stage;
      for (int step = 0; step < work.k_tiles; ++step, ++at) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        if (!has_rows) continue;
        uint32_t const full = cute::cast_smem_ptr_to_uint(shared.full[at.stage].address());
        uint32_t const to = cute::cast_smem_ptr_to_uint(shared.lhs[at.stage]) + in_tile * kRowBytes;
        load_rows<Config::kCluster>(Problem::gathered(params), rows, full, to,
                                    step * Config::kTileK);
      }
    }
    stage += work.k_tiles;
  });
}

// ---- each CTA loads all of its own rows, by three warps ----
//
// Two warps load 48 of the 128 boxes of a step each, and load nothing else. The warp that loads rhs
// loads the other 32 boxes. Clusters share rhs. Three warps issue the boxes of a step in fewer
// cycles than the products of 256 columns take, which two warps cannot do. With 128 columns, boxes
// take longer than products.

constexpr int kRowsBesideRhs = 32;
// Warp i of the two loads the 32 rows of a tile's first half from row 32 i on, and this many rows
// of the second half.
constexpr int kRowsOfSecondHalf = (kRowsPerConsumer - kRowsBesideRhs) / 2;

// Writes the numbers of rows [first, first + kRows) of a tile to shared memory. A whole warp calls
// it.
template <class Problem, int kRows, class Shared>
__device__ __forceinline__ void find_rows(typename Problem::Params const& params,
                                          WorkTile const& work, Shared& shared, int first) {
  int const lane = threadIdx.x % kWarpSize;
  if (lane >= kRows) return;
  int const index = Problem::gathered_index(params, work, work.m + first + lane);
  shared.rows[first + lane] = Problem::gathered_row(params, index);
}

// Loads a step of the rows that find_rows() found. One thread calls it.
template <class Problem, int kRows, class Shared, class Stage>
__device__ __forceinline__ void load_found_rows(typename Problem::Params const& params,
                                                Shared& shared, Stage const& at, int first,
                                                int step) {
  load_rows<1, kRows>(Problem::gathered(params), cute::cast_smem_ptr_to_uint(&shared.rows[first]),
                      cute::cast_smem_ptr_to_uint(shared.full[at.stage].address()),
                      cute::cast_smem_ptr_to_uint(shared.lhs[at.stage]) + first * kRowBytes,
                      step * Problem::Config::kTileK);
}

// The work of one of the two warps if rows of lhs are rows of the result.
template <class Problem, class Shared>
__device__ void gather_own_rows(typename Problem::Params const& params, Shared& shared, int warp) {
  using Config = typename Problem::Config;
  static_assert(GathersLhs<Problem>);
  int const first = warp * kWarpSize, second = kRowsPerConsumer + warp * kRowsOfSecondHalf;
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    if (work.k_tiles > 0) {
      find_rows<Problem, kWarpSize>(params, work, shared, first);
      find_rows<Problem, kRowsOfSecondHalf>(params, work, shared, second);
    }
    __syncwarp();
    if (cute::elect_one_sync()) {
      // The branch is outside of the loop, because the boxes before a branch must leave before the
      // boxes after it.
      auto const load_steps = [&](auto both) {
        auto at = stage;
        for (int step = 0; step < work.k_tiles; ++step, ++at) {
          shared.empty[at.stage].wait(at.phase ^ 1);
          load_found_rows<Problem, kWarpSize>(params, shared, at, first, step);
          if constexpr (both) {
            load_found_rows<Problem, kRowsOfSecondHalf>(params, shared, at, second, step);
          }
        }
      };
      if (Problem::rows_left(params, work) > kRowsPerConsumer) {
        load_steps(std::true_type{});
      } else {
        load_steps(std::false_type{});
      }
    }
    stage += work.k_tiles;
  });
}

// Stores to an address in shared memory, which takes one register, where a pointer takes two.
__device__ inline void store_shared(uint32_t to, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Loads kRows rows of lhs from row `first` of each step on, if rows are contracted. Each half of
// the tile's columns has its own boxes. `begin(stage)` is called before the boxes of a step are
// issued, always by the same thread. A whole warp calls this function.
//
// The numbers of rows come from device memory and go to the issuing thread through shared memory.
// Both take long, so the numbers of kStepsOfRows steps go together, and the next ones are read
// while boxes are issued.
template <class Problem, int kRows, class Shared, class Stage, class Begin>
__device__ __forceinline__ void load_own_contracted_rows(typename Problem::Params const& params,
                                                         WorkTile const& work, Shared& shared,
                                                         Stage& stage, int first,
                                                         Begin const& begin) {
  using Config = typename Problem::Config;
  constexpr int kIndices = kStepsOfRows * kRows / kWarpSize;  // of a lane
  static_assert(kStepsOfRows * kRows % kWarpSize == 0);
  // The statement is volatile, so that the lane is read here and takes no register of the
  // consumers.
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  uint32_t const rows = cute::cast_smem_ptr_to_uint(&shared.rows[kStepsOfRows * first]);
  int index[kIndices];
  auto const find = [&](int step) {
#pragma unroll
    for (int i = 0; i < kIndices; ++i) {
      int const slot = i * kWarpSize + lane;
      int const row = slot / kRows * Config::kTileK + slot % kRows;
      index[i] = Problem::gathered_index(params, work, step * Config::kTileK + first + row);
    }
  };
  if (work.k_tiles > 0) find(0);
  for (int step = 0; step < work.k_tiles; step += kStepsOfRows) {
#pragma unroll
    for (int i = 0; i < kIndices; ++i) {
      store_shared(rows + (i * kWarpSize + lane) * sizeof(int),
                   Problem::gathered_row(params, index[i]));
    }
    __syncwarp();
    find(step + kStepsOfRows);
    int const steps = min(work.k_tiles - step, kStepsOfRows);
    if (cute::elect_one_sync()) {
      // A tile whose second half has no columns loads its first half twice, so that no branch
      // parts the boxes of a step. No consumer reads the second copy.
      bool const both = Problem::rows_left(params, work) > kRowsPerConsumer;
      int const second_column = both ? work.m + kRowsPerConsumer : work.m;
      auto at = stage;
      for (int i = 0; i < steps; ++i, ++at) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        begin(at);
        uint32_t const full = cute::cast_smem_ptr_to_uint(shared.full[at.stage].address());
        uint32_t const to = cute::cast_smem_ptr_to_uint(shared.lhs[at.stage]) + first * kRowBytes;
        load_rows_twice<kRows>(Problem::gathered(params), rows + i * kRows * int(sizeof(int)), full,
                               to, to + Config::kLhsBoxBytes, work.m, second_column);
      }
    }
    stage += steps;
    __syncwarp();
  }
}

constexpr int kContractedBesideRhs = kRowsBesideRhs / 2;  // rows of two boxes
template <class Config>
constexpr int kContractedRows = (Config::kTileK - kContractedBesideRhs) / 2;

// The work of one of the two warps if rows are contracted.
template <class Problem, class Shared>
__device__ void gather_own_contracted_rows(typename Problem::Params const& params, Shared& shared,
                                           int warp) {
  using Config = typename Problem::Config;
  static_assert(GathersLhs<Problem> && kRowsPerConsumer == Config::kSlab);
  constexpr int kRows = kContractedRows<Config>;
  for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
    load_own_contracted_rows<Problem, kRows>(params, work, shared, stage, warp * kRows,
                                             [](auto const&) {});
  });
}

// The work of the warp that loads rhs, for one tile, if rows are contracted.
template <class Problem, class Shared, class Stage>
__device__ void load_rhs_and_contracted_rows(typename Problem::Params const& params,
                                             WorkTile const& work, Shared& shared, Stage& stage,
                                             int rank) {
  using Config = typename Problem::Config;
  constexpr int kFirst = 2 * kContractedRows<Config>;
  int step = 0;
  auto const begin = [&](auto const& at) {
    bool const both =
        Config::kRhsBoxesSplitK || Problem::columns_needed(params, work) > Config::kRhsBoxColumns;
    int const rhs_boxes = both ? 2 : 1;
    Barrier& full = shared.full[at.stage];
    full.arrive_and_expect_tx(rhs_boxes * Config::kRhsBoxBytes + Config::kLhsBytes);
    BoxLoader<Config::kCluster> const loader(full.address(), rank);
    auto* const rhs = reinterpret_cast<uint8_t*>(shared.rhs[at.stage]);
#pragma unroll
    for (int box = 0; box < Config::kBoxes; ++box) {
      if (box >= rhs_boxes) continue;
      int const k = Config::kRhsBoxesSplitK ? box * Config::kRhsBoxDepth : 0;
      int const column = Config::kRhsBoxesSplitK ? 0 : box * Config::kRhsBoxColumns;
      Problem::load_rhs(params, work, step * Config::kTileK + k, column, loader,
                        rhs + box * Config::kRhsBoxBytes, box, work.share == Share::kRhs);
    }
    ++step;
  };
  load_own_contracted_rows<Problem, kContractedBesideRhs>(params, work, shared, stage, kFirst,
                                                          begin);
}

}  // namespace jgg::sm90
