// The product for groups of few rows, which takes as long as reading the matrices. A warp copies
// records, and two warps bring rows. Two teams of four warps take records in turn, decode them, and
// multiply with `mma.sync`, which takes 16 columns by 8 rows.
//
// The work is cut along K into equal shares for all blocks, or into whole tiles if these keep
// enough blocks busy (`EvenAssignment`). The cuts cause few partial sums.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "few_rows/sizes.h"
#include "packed/epilogue.h"
#include "scheduler/even_assignment.h"
#include "scheduler/stream_k_schedule.h"
#include "sm90/dependent_launch.h"
#include "sm90/fixup/announcement.h"

namespace jgg::packed {

constexpr int kTeams = 2;
constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * kWarpSize;
constexpr int kStreamingBlocks = 2;  // of a multiprocessor

// Named barriers. The first two are for both teams, whose sums are added in shared memory. The last
// is for the first team alone.
enum TeamBarrier : int { kSumsThere = 1, kSumsTaken = 2, kFirstTeam = 3 };

// A tile has two strips, of one matrix or of gate and up, as `few_rows::has_up` says.
template <Format kFormat>
struct StreamingConfig
    : StageConfig<kFormat, /*kTileM=*/16, /*kRecords=*/16 / bits_of(kFormat), /*kStrips=*/2> {
  using Base = StageConfig<kFormat, 16, 16 / bits_of(kFormat), 2>;
  static constexpr int kTileN = Base::kStrips * kSide;
  static constexpr bool kSortsPairs = true;
  static constexpr int kBlocksOfRows = Base::kTileM / few_rows::kMmaRows;
  static constexpr int kSums = 2 * kBlocksOfRows * 4;  // of a thread

  // kSharedMemoryReserve is for barriers and the ring of work. It also has room for the order of
  // pairs, which takes a quarter of it.
  static constexpr int kReserve = sm90::kSharedMemoryReserve +
                                  few_rows::kGroupsAtOnce * sizeof(int) +
                                  kTeamThreads * kSums * sizeof(float);
  static constexpr int kStages = (few_rows::kSharedMemory - kReserve) / Base::kStageBytes;
};

template <class Config>
struct StreamingStorage : StageStorage<Config> {
  alignas(8) sm90::Barrier partials_there;
  float sums[Config::kSums][kTeamThreads];  // of the second team
  few_rows::Groups sorted;
};

template <int kStep, class Record, int kBlocks>
__device__ __forceinline__ void multiply_step(Record const& record,
                                              uint32_t const (&rows)[kBlocks][2][4],
                                              float (&sums)[kBlocks][4]) {
  Fragment a;
  record.template decode<kStep>(a);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    auto const& b = rows[block][kStep / 2];
    few_rows::multiply_add<cutlass::bfloat16_t>(sums[block], a, b[kStep % 2 * 2],
                                                b[kStep % 2 * 2 + 1]);
  }
}

// Adds a team's part of the product with the first 8 * kBlocks rows to `sums`. Calls
// `before_last()` before the last stage.
template <class Config, int kBlocks, class BeforeLast>
__device__ __forceinline__ void multiply(Params const& params, StreamingStorage<Config>& shared,
                                         int records, int team,
                                         sm90::StageIterator<Config::kStages>& stage,
                                         few_rows::Sums<kBlocks>& sums,
                                         BeforeLast const& before_last) {
  int const lane = threadIdx.x % kWarpSize, thread = threadIdx.x % kTeamThreads;
  int const place = lane % 8 * kRowBytes + (lane / 8 ^ lane % 8) * 16;
  for (; records > 0; records -= Config::kRecords, ++stage) {
    if (records <= Config::kRecords) before_last();
    shared.full[stage.stage].wait(stage.phase);
#pragma unroll
    for (int first = 0; first < Config::kRecords; first += kTeams) {
      int const record = first + team;
      if (record >= records) break;
      uint32_t rows[kBlocks][2][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint8_t const* const at = shared.rows[stage.stage][record] +
                                    block * few_rows::kMmaRows * kRowBytes +
                                    (place ^ half * (kRowBytes / 2));
          auto& b = rows[block][half];
          cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(at), b[0], b[1],
                                        b[2], b[3]);
        }
      }
#pragma unroll
      for (int strip = 0; strip < 2; ++strip) {
        uint8_t const* const groups = shared.groups[stage.stage][strip];
        typename Config::Of const of(shared.values[stage.stage][strip], groups,
                                     groups + Config::kScaleBytes, record, thread,
                                     params.group_shift);
        multiply_step<0>(of, rows, sums[strip]);
        multiply_step<1>(of, rows, sums[strip]);
        multiply_step<2>(of, rows, sums[strip]);
        multiply_step<3>(of, rows, sums[strip]);
      }
    }
    __syncwarp();
    if (lane == 0) shared.empty[stage.stage].arrive();
  }
}

// Passes the sums of a thread block's first team to another thread block, as in
// fixup/partial_sums.h.
template <class Config>
class Partials {
 public:
  __device__ explicit Partials(Params const& params) : params_(params) {}

  template <int kBlocks>
  __device__ void hand_over(int slot, few_rows::Sums<kBlocks> const& sums) const {
    float* const to = sums_of(slot);
    each<kBlocks>([&](int i, int strip, int block, int e) {
      __stcg(to + i * kTeamThreads + threadIdx.x % kTeamThreads, sums[strip][block][e]);
    });
    sm90::sync_named(kTeamThreads, kFirstTeam);
    if (threadIdx.x % kTeamThreads == 0) sm90::announce(to, params_.announcements + slot);
  }

  // Waits for the sums of `count` slots from `slot` on. One thread calls this.
  __device__ void await(int slot, int count) const {
    for (int i = slot; i < slot + count; ++i) sm90::await(sums_of(i), params_.announcements + i);
  }

  template <int kBlocks>
  __device__ void add(int slot, few_rows::Sums<kBlocks>& sums) const {
    float const* const from = sums_of(slot);
    each<kBlocks>([&](int i, int strip, int block, int e) {
      sums[strip][block][e] += __ldcg(from + i * kTeamThreads + threadIdx.x % kTeamThreads);
    });
  }

  // Calls `function(i, strip, block, e)` for each of a thread's sums.
  template <int kBlocks, class Function>
  __device__ static __forceinline__ void each(Function&& function) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks * 4; ++i) {
      function(i, i / (4 * kBlocks), i / 4 % kBlocks, i % 4);
    }
  }

 private:
  __device__ float* sums_of(int slot) const {
    return params_.partial_sums + int64_t(slot) * Config::kSums * kTeamThreads;
  }

  Params const& params_;
};

template <class Config, int kBlocks>
__device__ __forceinline__ void compute_blocks(Params const& params,
                                               StreamingStorage<Config>& shared,
                                               WorkTile const& work,
                                               sm90::StageIterator<Config::kStages>& stage,
                                               int team) {
  using Partials = packed::Partials<Config>;
  int const thread = threadIdx.x % kTeamThreads;
  bool const stores = team == 0 && work.partials != kHandsOver;
  // The epilogue is made where it is used, because its columns would take registers from the
  // product.
  auto const epilogue = [&] {
    return Epilogue<Config>(params, work, uniform(thread / kWarpSize) * few_rows::kMmaColumns,
                            shared.sorted.order);
  };
  Partials const partials(params);
  few_rows::Sums<kBlocks> sums = {}, next = {};
  Terms<kBlocks> terms;
  // While matrices stream, a load takes a microsecond or more. So loads for the end of a tile are
  // issued before its last stage. With more sums, there are too few registers for this.
  constexpr bool kEarly = kBlocks == 1;
  multiply<Config, kBlocks>(params, shared, records_of<Config>(params, work), team, stage, sums,
                            [&] {
                              if (!kEarly || !stores) return;
                              terms = epilogue().template read<kBlocks>();
                              if (work.partials == 0) return;
                              shared.partials_there.wait(0);
                              partials.add(work.slot, next);
                            });
  constexpr int kBoth = kTeams * kTeamThreads;
  if (team == 1) {
    sm90::sync_named(kBoth, kSumsTaken);
    Partials::template each<kBlocks>([&](int i, int strip, int block, int e) {
      shared.sums[i][thread] = sums[strip][block][e];
    });
    sm90::arrive_named(kBoth, kSumsThere);
    return;
  }
  sm90::sync_named(kBoth, kSumsThere);
  Partials::template each<kBlocks>(
      [&](int i, int strip, int block, int e) { sums[strip][block][e] += shared.sums[i][thread]; });
  sm90::arrive_named(kBoth, kSumsTaken);

  if (!stores) return partials.template hand_over<kBlocks>(work.slot, sums);
  // Sums are always added in the order of K, so that the result is the same every time.
  if constexpr (kEarly) {
    Partials::template each<kBlocks>(
        [&](int, int strip, int block, int e) { sums[strip][block][e] += next[strip][block][e]; });
  } else if (work.partials > 0) {
    shared.partials_there.wait(0);
  }
  for (int i = kEarly; i < work.partials; ++i) partials.add(work.slot + i, sums);
  if constexpr (!kEarly) terms = epilogue().template read<kBlocks>();
  epilogue().store(sums, terms);
}

template <class Config_>
struct StreamingRoles {
  using Config = Config_;
  using Params = packed::Params;
  using Shared = StreamingStorage<Config>;
  static constexpr sm90::Registers kRegisters{};  // as launched, for two thread blocks
  static constexpr int kThreads = (2 + kRowWarps + kTeams * kTeamWarps) * kWarpSize;
  static constexpr int kBlocks = kStreamingBlocks;
  static_assert(sizeof(Shared) <= few_rows::kSharedMemory);

  __device__ static void initialize(Params const&, Shared& shared) {
    constexpr int kConsumerWarps = kTeams * kTeamWarps;
    if (threadIdx.x == 0) {
      sm90::set_arrivals(shared.full, 1 + kRowThreads);
      sm90::set_arrivals(shared.empty, kConsumerWarps);
      sm90::set_arrivals(shared.work_full, 1);
      sm90::set_arrivals(shared.work_empty, 1 + kRowWarps + kConsumerWarps);
      shared.partials_there.init(1);
      sm90::fence_barriers();
    }
    sm90::let_next_begin();
  }

  __device__ static void load(Params const& params, Shared& shared, int) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      load_records<Config>(params, shared, work, stage,
                           static_cast<uint64_t>(sm90::LoadHint::kEvictFirst));
    });
  }

  __device__ static void schedule(Params const& params, Shared& shared, int rank) {
    GroupSizes const groups =
        few_rows::read_groups(params.pairs.groups, params.groups, shared.sorted);
    auto const schedule_of = [&](int cluster, int clusters) {
      return StreamKSchedule<DeviceWarp, Config::kTileM, Config::kTileN, Config::kTileK, 1,
                             EvenAssignment>(groups, params.columns, params.k, cluster, clusters);
    };
    sm90::schedule_pieces<Config>(schedule_of, shared, rank);
  }

  // The first warp also waits for the partial sums of other thread blocks, because it runs ahead of
  // the warps that multiply. A thread block adds partial sums only in its last tile that has a
  // product.
  __device__ static void bring(Params const& params, Shared& shared, int, int warp) {
    if (warp == 1) few_rows::sort_pairs(params.pairs.groups, params.groups, shared.sorted);
    sm90::await_previous();
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      load_rows<Config>(params, shared, work, stage, shared.sorted.order);
      if (warp == 0 && work.partials > 0) {
        if (DeviceWarp::leads()) {
          Partials<Config>(params).await(work.slot, work.partials);
          shared.partials_there.arrive();
        }
        __syncwarp();
      }
    });
  }

  __device__ static void consume(Params const& params, Shared& shared, int team) {
    constexpr int kBoth = kTeams * kTeamThreads;
    // Lets the second team write its first sums.
    if (team == 0) sm90::arrive_named(kBoth, kSumsTaken);
    sm90::StageIterator<Config::kStages> stage;
    for (int tile = 0;; ++tile) {
      sm90::WorkIterator slot = sm90::slot_of(tile);
      WorkTile const work = sm90::read_work(shared, slot);
      if (work.k_tiles == sm90::kNoMoreWork) break;
      if (work.k_tiles == 0) {
        if (team == 0) {
          few_rows::store_zeros<Config>(params, work, threadIdx.x % kTeamThreads, kTeamThreads,
                                        shared.sorted.order);
        }
        continue;
      }
      few_rows::with_blocks<Config::kBlocksOfRows>(uniform(work.extent - work.m), [&](auto blocks) {
        compute_blocks<Config, blocks.value>(params, shared, work, stage, team);
      });
      __syncwarp();
    }
    if (team == 1) sm90::sync_named(kBoth, kSumsTaken);
  }
};

}  // namespace jgg::packed
