// The product for groups of more rows than streaming.h is for (quantized/plan.py). Two consumers
// decode records from shared memory into registers, which are WGMMA's operand on the M side.
// Columns of the matrices are on WGMMA's M side, and rows are on its N side, which is as wide as
// the tile has rows, or half as wide. Decoding 16 elements of K overlaps with the products of the
// previous 16.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "packed/rows_epilogue.h"
#include "scheduler/ragged_schedule.h"
#include "scheduler/tails_apart_schedule.h"
#include "sm90/swapped.h"
#include "sm90/wgmma.h"

namespace jgg::packed {

using sm90::kConsumers;
using sm90::kWarpgroup;
constexpr int kConsumerWarps = kConsumers * kWarpgroup / kWarpSize;

// With one thread block on a multiprocessor, each warp scheduler has two warps that decode, and
// these two warps wait longer than they issue. So two thread blocks share a multiprocessor if tiles
// have few rows.
//
// Fewer records in a stage make room for more stages in flight, but consumers then wait and fence
// more often, and cannot read a record ahead, and a stage has as many copies as before. Tiles of
// 128 rows and 8 bits would have room for two stages of two records only. They have four stages of
// one record instead, and so do tall tiles.
//
// Tall tiles multiply each decoded operand by twice as many rows, so codes are decoded half as
// often. The sums have room because a consumer has only one strip. Two CTAs share the rows, because
// tall tiles read twice as many rows for the same number of products.
template <Format kFormat, int kTileM>
using DecodingStages =
    StageConfig<kFormat, kTileM,
                /*kRecords=*/
                kTileM <= kFewRows || (kTileM <= kManyRows && bits_of(kFormat) < 8) ? 2 : 1,
                /*kStrips=*/(kTileM <= kManyRows ? 2 : 1) * kConsumers, /*kWholeVectors=*/true,
                /*kCluster=*/kTileM <= kManyRows ? 1 : 2>;

template <Format kFormat, bool kHasUp_, int kTileM>
struct DecodingConfig : DecodingStages<kFormat, kTileM> {
  using Base = DecodingStages<kFormat, kTileM>;
  static constexpr bool kHasUp = kHasUp_;
  static constexpr int kOwnStrips = Base::kStrips / kConsumers;  // of a consumer
  static constexpr int kColumns = Base::kStrips * kSide;
  static constexpr int kTileN = kColumns / (kHasUp ? 2 : 1);  // of the result
  // Whether separate warps, the epilogue warps, turn rounded sums into results.
  static constexpr bool kHasEpilogueWarps = kTileM > kFewRows;
  static constexpr int kBlocks = kHasEpilogueWarps ? 1 : 2;
  // Whether TMA may load rows if many of them are consecutive. Most kernels with up gather rows.
  static constexpr bool kMayHaveRowBoxes = Base::kOnlyRowBoxes || (kHasEpilogueWarps && !kHasUp);
  static constexpr bool kSortsPairs = false;
  static constexpr int kSharedMemory =
      kBlocks == 1 ? sm90::kSharedMemoryLimit : few_rows::kSharedMemory;
  // Whether consumers read both records of a stage at its beginning. If they read the second record
  // right before its first step, products wait for it. With two thread blocks on a multiprocessor
  // there are no registers for this. If the last stage has only one record, the second is read for
  // nothing.
  static constexpr bool kReadsAhead = kBlocks == 1 && Base::kRecords > 1;
  static constexpr int kFloats = 2 * kColumns + (kHasUp ? 1 : kTileM);  // of RoundedTile
  static constexpr int kRoundedBytes = kHasEpilogueWarps
                                           ? kTileM * kColumns * 2 + kFloats * int(sizeof(float))
                                           : kConsumerWarps * int(sizeof(RoundedRows));
  // Barriers, the ring of work and padding take less than a kilobyte. With
  // sm90::kSharedMemoryReserve, tall tiles of 8 bits would have a stage less.
  static constexpr int kReserve = 1024 + Base::kTokens * int(sizeof(int)) + kRoundedBytes;
  static constexpr int kStages = (kSharedMemory - kReserve) / Base::kStageBytes;
  // A stage is released only while the next stage is multiplied.
  static_assert(kStages >= 2);
};

template <class Config>
struct DecodingStorage : StageStorage<Config> {
  RoundedRows rounded[kConsumerWarps];
};
template <class Config>
  requires Config::kHasEpilogueWarps
struct DecodingStorage<Config> : StageStorage<Config> {
  RoundedTile<Config> rounded;
};

template <class Config>
class DecodingMainloop {
  static constexpr int kOwnStrips = Config::kOwnStrips;
  struct Records {
    typename Config::Of strip[kOwnStrips];
  };
  using Shared = DecodingStorage<Config>;
  using Element = typename Config::Element;
  static constexpr int kColumns = sm90::kColumnsPerConsumer;

  // Returns how many WGMMAs share the rows. One has at most kManyRows, because a thread cannot have
  // the registers for more when the kernel begins.
  static constexpr int parts_of(int rows) { return rows > kManyRows ? 2 : 1; }
  template <int kRows>
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kColumns>, cute::Int<kRows / parts_of(kRows)>,
                      cute::Int<kSide>>>()));
  template <int kRows>
  using Product = decltype(cute::partition_fragment_C(
      Mma<kRows>{}, cute::Shape<cute::Int<kColumns>, cute::Int<kRows / parts_of(kRows)>>{}));
  template <int kRows>
  using Products = Product<kRows>[kOwnStrips][parts_of(kRows)];

 public:
  // Multiplies a tile of at most kRows rows, and stores the results or hands over rounded sums.
  // `phase` is that of the barriers of RoundedTile.
  template <int kRows>
  __device__ static void compute(Params const& params, WorkTile const& work, Shared& shared,
                                 sm90::StageIterator<Config::kStages>& stage, int consumer,
                                 unsigned phase) {
    Products<kRows> products;
    int const records = records_of<Config>(params, work);
    constexpr int kSumsOfPart = kRows / parts_of(kRows) / 2;
    auto const sum = [&](int strip, int i) {
      return products[strip][i / kSumsOfPart](i % kSumsOfPart);
    };
    if constexpr (Config::kHasEpilogueWarps) {
      multiply<kRows>(params, records, shared, stage, consumer, products, [] {});
      round_tile<Config, kRows>(sum, shared.rounded, consumer, phase);
    } else {
      int const warp = threadIdx.x % kWarpgroup / kWarpSize;
      FewRowsEpilogue<Config, kRows> epilogue(
          params, work, consumer * (Config::kTileN / kConsumers) + warp * few_rows::kMmaColumns);
      multiply<kRows>(params, records, shared, stage, consumer, products, [&] { epilogue.read(); });
      epilogue.store(sum, shared.rounded[consumer * (kWarpgroup / kWarpSize) + warp]);
    }
  }

 private:
  // Returns the operand of the rows for the first record of the first stage.
  template <int kRows>
  __device__ static auto row_descriptors(Shared& shared) {
    using namespace cute;
    using Layout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                          Shape<Int<kRows / parts_of(kRows)>, Int<kSide>>{}));
    auto const tile =
        make_tensor(make_smem_ptr(reinterpret_cast<Element*>(shared.rows[0][0])), Layout{});
    auto const thread_mma = Mma<kRows>{}.get_slice(threadIdx.x % kWarpgroup);
    return sm90::in_uniform_registers(thread_mma.make_fragment_B(thread_mma.partition_B(tile)));
  }

  template <int kStep, int kRows, class Rows>
  __device__ static __forceinline__ void issue(typename Config::Of const& record, Rows const& rows,
                                               Fragment& a,
                                               Product<kRows> (&products)[parts_of(kRows)],
                                               bool accumulates) {
    using namespace cute;
    record.template decode<kStep>(a);
    auto const registers =
        make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(a)), Layout<Shape<Int<8>, Int<1>>>{});
    warpgroup_arrive();
    Mma<kRows> mma;
    mma.accumulate_ = accumulates ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    constexpr int kParts = parts_of(kRows), kRowsOfPart = kRows / kParts;
    static_assert(kRowsOfPart % 8 == 0, "parts are whole swizzle atoms");
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      auto const of_part = sm90::advance(rows, part * kRowsOfPart * kRowBytes);
      gemm(mma, registers, of_part(_, _, kStep), products[part]);
    }
  }

  // Sets products to the strips of a consumer times a tile's rows. Operand registers of products
  // in flight must not change, so there are two sets: one for the previous 16 elements of K, and
  // one for the current 16. Calls `meanwhile` while the last products are in flight.
  template <int kRows, class Meanwhile>
  __device__ static __forceinline__ void multiply(Params const& params, int records, Shared& shared,
                                                  sm90::StageIterator<Config::kStages>& stage,
                                                  int consumer, Products<kRows>& products,
                                                  Meanwhile const& meanwhile) {
    using namespace cute;
    auto const rows = row_descriptors<kRows>(shared);
    int const thread = threadIdx.x % kWarpgroup;
    Fragment a[2][kOwnStrips];
    auto const fence = [&] {
#pragma unroll
      for (auto& of_strip : products) {
#pragma unroll
        for (auto& product : of_strip) warpgroup_fence_operand(product);
      }
    };
    fence();
    auto const release = [&](int of) {
      int const lane = thread % kWarpSize;
      if constexpr (Config::kCluster > 1) {
        shared.empty[of].arrive(lane, lane < Config::kCluster);
      } else {
        if (lane == 0) shared.empty[of].arrive();
      }
    };
    int before = -1;
#pragma unroll 1
    for (; records > 0; records -= Config::kRecords, ++stage) {
      shared.full[stage.stage].wait(stage.phase);
      // A fence is needed if threads have written the rows, because WGMMA reads them through the
      // async proxy.
      if constexpr (!Config::kOnlyRowBoxes) sm90::fence_async_proxy();
      auto const read = [&](int record) {
        auto const of_strip = [&](int strip) {
          int const at = consumer * kOwnStrips + strip;
          uint8_t const* const groups = shared.groups[stage.stage][at];
          return
              typename Config::Of(shared.values[stage.stage][at], groups,
                                  groups + Config::kScaleBytes, record, thread, params.group_shift);
        };
        if constexpr (kOwnStrips == 1) {
          return Records{of_strip(0)};
        } else {
          return Records{of_strip(0), of_strip(1)};
        }
      };
      auto const multiply_records = [&](auto const& record_of) {
#pragma unroll
        for (int record = 0; record < Config::kRecords; ++record) {
          if (record >= records) break;
          Records const of = record_of(record);
          auto const here =
              sm90::advance(rows, (stage.stage * Config::kRecords + record) * Config::kRowsBytes);
          auto const step = [&](auto k) {
            constexpr int kStep = decltype(k)::value;
            bool const accumulates = kStep > 0 || record > 0 || before >= 0;
#pragma unroll
            for (int strip = 0; strip < kOwnStrips; ++strip) {
              issue<kStep, kRows>(of.strip[strip], here, a[kStep % 2][strip], products[strip],
                                  accumulates);
            }
            warpgroup_commit_batch();
            warpgroup_wait<1>();
          };
          step(Int<0>{});
          if (record == 0 && before >= 0) release(before);
          step(Int<1>{});
          step(Int<2>{});
          step(Int<3>{});
        }
      };
      if constexpr (Config::kReadsAhead) {
        Records const first = read(0), second = read(1);
        multiply_records([&](int record) { return record == 0 ? first : second; });
      } else {
        multiply_records(read);
      }
      before = stage.stage;
    }
    meanwhile();
    warpgroup_wait<0>();
    release(before);
    fence();
  }
};

template <class Config_>
struct DecodingRoles {
  using Config = Config_;
  using Params = packed::Params;
  using Shared = DecodingStorage<Config>;
  static constexpr int kEpilogueWarps =
      Config::kHasEpilogueWarps ? ManyRowsEpilogue<Config>::kWarps : 0;
  static constexpr int kThreads = sm90::kThreads + kEpilogueWarps * kWarpSize;
  static constexpr int kBlocks = Config::kBlocks;
  // Threads that load keep many addresses.
  static constexpr sm90::Registers kRegisters =
      Config::kHasEpilogueWarps ? sm90::Registers{56, 200, 56} : sm90::Registers{48, 96};
  static_assert(sizeof(Shared) <= Config::kSharedMemory);

  __device__ static void initialize(Params const& params, Shared& shared) {
    if (threadIdx.x == 0) {
      bool const has_row_boxes = Config::kMayHaveRowBoxes && params.has_row_boxes;
      sm90::set_arrivals(shared.full, 1 + (has_row_boxes ? 1 : kRowThreads));
      sm90::set_arrivals(shared.empty, Config::kCluster * kConsumerWarps);
      sm90::set_arrivals(shared.work_full, 1);
      sm90::set_arrivals(shared.work_empty, 1 + kRowWarps + kConsumerWarps + kEpilogueWarps);
      if constexpr (Config::kHasEpilogueWarps) {
        shared.rounded.full.init(kConsumerWarps);
        shared.rounded.ready.init(kEpilogueWarps);
      }
      sm90::fence_barriers();
    }
  }

  __device__ static void load(Params const& params, Shared& shared, int) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      // If a group has several tiles, all of them read the same records, which should stay in L2.
      bool const once = Config::kBlocks > 1 && work.extent <= Config::kTileM;
      auto const hint = once ? sm90::LoadHint::kEvictFirst : sm90::LoadHint::kNormal;
      load_records<Config>(params, shared, work, stage, static_cast<uint64_t>(hint));
    });
  }

  __device__ static void schedule(Params const& params, Shared& shared, int rank) {
    constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;
    if constexpr (kTileM <= kFewRows) {
      NoncontractingSchedule<DeviceWarp, kTileM, kTileN, kTileK, 1> schedule(params.groups,
                                                                             params.n, params.k);
      sm90::fill_ring<Config>(schedule, RoundRobin(blockIdx.x, gridDim.x), shared);
    } else {
      auto const schedule_of = [&](int cluster, int clusters) {
        return TailsApartSchedule<DeviceWarp, kTileM, kTileN, kTileK, Config::kCluster>(
            params.groups, params.n, params.k, cluster, clusters);
      };
      sm90::schedule_pieces<Config>(schedule_of, shared, rank);
    }
  }

  __device__ static void bring(Params const& params, Shared& shared, int rank, int warp) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if constexpr (Config::kMayHaveRowBoxes) {
        if (Config::kOnlyRowBoxes || params.has_row_boxes) {
          if (warp == 0) load_row_boxes<Config>(params, shared, work, stage, rank);
          return;
        }
      }
      if constexpr (!Config::kOnlyRowBoxes) {
        load_rows<Config>(params, shared, work, stage, nullptr);
      }
    });
  }

  __device__ static void assist(Params const& params, Shared& shared)
    requires(Config::kHasEpilogueWarps)
  {
    unsigned phase = 0;
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto&) {
      if (work.k_tiles == 0) return store_zeros(params, work);
      ManyRowsEpilogue<Config> epilogue(params, work);
      epilogue.prepare(shared.rounded);
      epilogue.store(shared.rounded, phase);
      phase ^= 1;
    });
  }

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    unsigned phase = 0;
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if (work.k_tiles == 0) {
        if (!Config::kHasEpilogueWarps && consumer == 0) store_zeros(params, work);
        return;
      }
      int const rows_of_tile = uniform(sm90::rows_of<Config>(work));
      auto const compute = [&](auto rows) {
        DecodingMainloop<Config>::template compute<rows.value>(params, work, shared, stage,
                                                               consumer, phase);
      };
      if constexpr (Config::kTileM == kFewRows) {
        sm90::with_least<16, kFewRows>(rows_of_tile, compute);
      } else if constexpr (Config::kTileM == kTallRows) {
        sm90::with_least<32, 64, 96, 128, 160, 192, 224, kTallRows>(rows_of_tile, compute);
      } else {
        // The instance of 96 rows saves a quarter of the time of groups with a little more than 64
        // rows.
        sm90::with_least<16, 32, 64, 96, Config::kTileM>(rows_of_tile, compute);
      }
      phase ^= 1;
    });
  }

 private:
  __device__ static void store_zeros(Params const& params, WorkTile const& work) {
    few_rows::store_zeros<Config>(params, work, threadIdx.x % kWarpgroup, kWarpgroup, nullptr);
  }
};

}  // namespace jgg::packed
