// Copies operands to shared memory: records by bulk copies, and rows by threads, or by TMA if many
// rows are consecutive. A TMA box of several rows cannot have rows of arbitrary tokens, nor rows of
// an arbitrary length.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "packed/params.h"
#include "sm90/swapped.h"
#include "sm90/tma/load.h"
#include "sm90/work.h"

namespace jgg::packed {

using sm90::kRowBytes;

// The stages of all kernels of packed matrices. A stage has a few records of each strip of 64
// columns, and the same elements of K of the rows. The strips belong to gate and up alternately, or
// are consecutive strips of one matrix.
template <Format kFormat_, int kTileM_, int kRecords_, int kStrips_, bool kWholeVectors_ = false,
          int kCluster_ = 1>
struct StageConfig {
  using Element = cutlass::bfloat16_t;
  static constexpr Format kFormat = kFormat_;
  static constexpr int kTileM = kTileM_;
  static constexpr int kRecords = kRecords_;  // of a strip, in a stage
  static constexpr int kStrips = kStrips_;
  static constexpr bool kWholeVectors = kWholeVectors_;  // whether rows of x are whole vectors
  // The CTAs of a cluster are neighbours along N and share rows, which only TMA can load for both.
  static constexpr int kCluster = kCluster_;
  static constexpr bool kOnlyRowBoxes = kCluster > 1;
  // Schedules count steps of this many records. A step has 128 elements of K, so no group of int4
  // crosses the boundary of a step.
  static constexpr int kStepRecords = 2;
  static constexpr int kTileK = kStepRecords * kSide;
  static constexpr int kNextRun = kSide;  // between a thread's columns of two strips
  // If stages have one record, both stages of a group of two records have its scale.
  static_assert(kRecords == 1 || kRecords % kStepRecords == 0);

  using Of = Record<kFormat>;
  static constexpr int kRecordBytes = record_bytes(kFormat);
  static constexpr int kValueBytes = kRecords * kRecordBytes;
  static constexpr int kScaleBytes = kRecords * Of::kSlots * Of::kSlotBytes;
  static constexpr bool kHasZeros = kFormat == Format::kInt4Zeros;
  static constexpr int kGroupBytes = kHasZeros ? kScaleBytes * 3 / 2 : kScaleBytes;
  static_assert(kValueBytes % 16 == 0 && kGroupBytes % 16 == 0, "bulk copies are of 16 bytes");
  static constexpr int kRowsBytes = kTileM * kRowBytes;       // of a record's part of K
  static constexpr int kTokens = kOnlyRowBoxes ? 1 : kTileM;  // that load_rows() finds
  static constexpr int kStageBytes = kStrips * (kValueBytes + kGroupBytes) + kRecords * kRowsBytes;
};

template <class Config>
struct StageStorage {
  alignas(1024) uint8_t rows[Config::kStages][Config::kRecords][Config::kRowsBytes];
  alignas(128) uint8_t values[Config::kStages][Config::kStrips][Config::kValueBytes];
  alignas(128) uint8_t
      groups[Config::kStages][Config::kStrips][Config::kGroupBytes > 0 ? Config::kGroupBytes : 16];
  int tokens[Config::kTokens];
  WorkTile work[sm90::kWorkStages];
  alignas(8) sm90::Barrier full[Config::kStages];
  alignas(8) sm90::Barrier empty[Config::kStages];
  alignas(8) sm90::Barrier work_full[sm90::kWorkStages];
  alignas(8) sm90::Barrier work_empty[sm90::kWorkStages];
};

// Return the first record along K of a piece of a tile, and the number of its records.
template <class Config>
__device__ int first_record(WorkTile const& work) {
  return work.first_step * Config::kStepRecords;
}
template <class Config>
__device__ int records_of(Params const& params, WorkTile const& work) {
  return min(work.k_tiles * Config::kStepRecords, params.records() - first_record<Config>(work));
}

__device__ __forceinline__ void copy(void* to, void const* from, unsigned bytes, uint64_t* barrier,
                                     uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
      "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "l"(hint)
      : "memory");
}

// Issues the bulk copies of a tile's records. Addresses are computed once for a tile.
template <class Config>
class Copier {
  static constexpr int kStrips = Config::kStrips;
  static constexpr int kKinds = Config::Of::kSlotBytes == 0 ? 1 : Config::kHasZeros ? 3 : 2;

 public:
  __device__ Copier(Params const& params, WorkTile const& work) {
    if constexpr (is_int4(Config::kFormat)) shift_ = params.group_shift;
    bool const has_up = few_rows::has_up<Config>(params);
    int const first = few_rows::first_column<Config>(params, work) / kSide;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      // If a tile reaches past the last strip, the last strip is copied again. Results of this copy
      // are not stored.
      int const at = min(first + (has_up ? strip / 2 : strip), params.strips() - 1);
      unsigned const before = work.group * params.strips() + at;
      Matrices const& matrices = has_up && strip % 2 ? params.up : params.gate;
      uint8_t const* const arrays[] = {matrices.values, matrices.scales, matrices.zero_points};
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        unsigned const units_before = before * units(kind, params.records());
        from_[strip][kind] = arrays[kind] + uint64_t(units_before) * unit(kind);
      }
    }
  }

  // Returns the bytes of all strips of consecutive records that begin a group, or of a record.
  __device__ unsigned bytes(int records) const {
    unsigned sum = 0;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) sum += units(kind, records) * unit(kind);
    return kStrips * sum;
  }

  template <class Shared>
  __device__ void copy(Shared& shared, int stage, int first, int count, uint64_t hint) const {
    uint64_t* const barrier = shared.full[stage].address();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      uint8_t* const groups = shared.groups[stage][strip];
      uint8_t* const to[] = {shared.values[stage][strip], groups, groups + Config::kScaleBytes};
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        uint64_t const at = uint64_t(2 * first >> shift(kind)) * unit(kind);
        unsigned const bytes = units(kind, count) * unit(kind);
        packed::copy(to[kind], from_[strip][kind] + at, bytes, barrier, hint);
      }
    }
  }

 private:
  // Returns the bytes of a unit: a record's values, or a group's scales or zero points. Zero points
  // have half as many bytes as scales.
  __device__ static constexpr unsigned unit(int kind) {
    return kind == 0 ? Config::kRecordBytes : Config::Of::kSlotBytes / kind;
  }
  // Returns log2 of the halves of records that share a unit.
  __device__ int shift(int kind) const { return kind == 0 ? 1 : shift_; }
  __device__ unsigned units(int kind, int records) const {
    return (2 * records + (1 << shift(kind)) - 1) >> shift(kind);
  }

  uint8_t const* from_[kStrips][kKinds];
  int shift_ = 1;
};

// Loads the records of all strips of a tile. One warp calls this.
template <class Config, class Shared>
__device__ void load_records(Params const& params, Shared& shared, WorkTile work,
                             sm90::StageIterator<Config::kStages>& stage, uint64_t hint) {
  // Addresses that follow from these are in uniform registers, as the copies need them.
  work.group = uniform(work.group);
  work.n = uniform(work.n);
  work.first_step = uniform(work.first_step);
  int const first = first_record<Config>(work), records = records_of<Config>(params, work);
  if (records <= 0) return;
  Copier<Config> const copier(params, work);
  for (int done = 0; done < records; done += Config::kRecords, ++stage) {
    int const count = min(records - done, Config::kRecords);
    shared.empty[stage.stage].wait(stage.phase ^ 1);
    // One thread issues all copies. If each lane issued one, the compiler would make a loop over
    // lanes, and a copy would take 65 cycles (sm90/gather.h).
    if (cute::elect_one_sync()) {
      shared.full[stage.stage].arrive_and_expect_tx(copier.bytes(count));
      copier.copy(shared, stage.stage, first + done, count, hint);
    }
  }
}

constexpr int kRowWarps = 2;
constexpr int kRowThreads = kRowWarps * kWarpSize;

// Loads the rows of a tile. Each thread that brings rows calls this. A row's 128 bytes of a record
// are eight vectors of 16 bytes, swizzled for WGMMA and ldmatrix. Places of rows that the tile does
// not have keep old data, which only reaches rows of the result that are not stored. `order` is as
// in `Product::pair`.
template <class Config, class Shared>
__device__ void load_rows(Params const& params, Shared& shared, WorkTile const& work,
                          sm90::StageIterator<Config::kStages>& stage, int const* order) {
  constexpr int kPieces = kRowBytes / 16, kElements = 16 / sizeof(typename Config::Element);
  constexpr int kRowsAtOnce = kRowThreads / kPieces, kOwn = Config::kTileM / kRowsAtOnce;
  constexpr int kBranches = kOwn < 4 ? kOwn : 4;  // rows copied without a branch between them
  int const first = first_record<Config>(work), records = records_of<Config>(params, work);
  if (records <= 0) return;
  int const thread = threadIdx.x % kRowThreads, piece = thread % kPieces;
  int const own = thread / kPieces, rows = sm90::rows_of<Config>(work);
  bool in_vectors = params.k % kElements == 0;
  if constexpr (Config::kWholeVectors) in_vectors = true;
  // The threads of a warp find the tokens of its rows together, and keep them in shared memory. If
  // they passed them on by shuffles, kernels would be 2 to 3 % slower.
#pragma unroll 1
  for (int i = piece; i < kOwn; i += kPieces) {
    int const row = own + i * kRowsAtOnce;
    unsigned const token =
        row < rows ? params.template token<Config::kSortsPairs>(work.begin + work.m + row, order)
                   : ~0u;
    shared.tokens[row] = token < static_cast<unsigned>(params.tokens) ? int(token) : -1;
  }
  __syncwarp();
  // The offsets of a thread's rows in x count vectors, of which x has at most 2^32. The offsets are
  // computed once for a tile, because two warps have to issue 16 KB of copies in the time that the
  // products of 64 elements of K take.
  uint32_t from[kOwn], exist = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const token = shared.tokens[own + i * kRowsAtOnce];
    from[i] = token < 0 ? 0 : token * static_cast<unsigned>(params.k / kElements);
    exist |= (token < 0 ? 0u : 1u) << i;
  }
  int const count = rows > own ? (rows - own + kRowsAtOnce - 1) / kRowsAtOnce : 0;

  int const place = own * kRowBytes + (piece ^ own % kPieces) * 16;
  for (int done = 0; done < records; done += Config::kRecords, ++stage) {
    shared.empty[stage.stage].wait(stage.phase ^ 1);
#pragma unroll 1
    for (int record = 0; record < Config::kRecords && done + record < records; ++record) {
      int const step = (first + done + record) * kPieces, k = (step + piece) * kElements;
      uint8_t* const to = shared.rows[stage.stage][record] + place;
      if (in_vectors) {
        char const* const x = params.x + (int64_t(step) + piece) * 16;
        uint32_t const reads = k < params.k ? exist : 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (i % kBranches == 0 && i >= count) break;
          cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
              *reinterpret_cast<cute::uint128_t const*>(x + uint64_t(from[i]) * 16),
              *reinterpret_cast<cute::uint128_t*>(to + i * kRowsAtOnce * kRowBytes),
              reads >> i & 1);
        }
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        int const token = shared.tokens[own + i * kRowsAtOnce];
        auto const* const x =
            reinterpret_cast<uint16_t const*>(params.x) + int64_t(token) * params.k + k;
        uint32_t words[4] = {};
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          // __ldg is not allowed, because the previous kernel may still have been writing x when
          // this kernel began.
          uint32_t const bits = token >= 0 && k + e < params.k ? x[e] : 0;
          words[e / 2] |= bits << e % 2 * 16;
        }
        *reinterpret_cast<uint4*>(to + i * kRowsAtOnce * kRowBytes) = {words[0], words[1], words[2],
                                                                       words[3]};
      }
    }
    if (in_vectors) {
      shared.full[stage.stage].arrive_after_copies();
    } else {
      shared.full[stage.stage].arrive();
    }
  }
  __syncwarp();  // before `tokens` gets those of the next tile
}

constexpr int kBoxRows = 64;  // of `Params::row_boxes`

// Loads the rows of a tile by TMA, in place of load_rows(), if they are consecutive rows of x. The
// CTAs of a cluster load boxes in turn, and each CTA waits for the bytes of all boxes. The last box
// also loads rows of the next groups, or zeros past the end of x. These only reach rows of the
// result that are not stored. One warp calls this.
template <class Config, class Shared>
__device__ void load_row_boxes(Params const& params, Shared& shared, WorkTile const& work,
                               sm90::StageIterator<Config::kStages>& stage, int rank) {
  static_assert(Config::kTileM % kBoxRows == 0);
  int const first = first_record<Config>(work), records = records_of<Config>(params, work);
  if (records <= 0) return;
  int const row = work.begin + work.m;
  int const boxes = ceil_div(sm90::rows_of<Config>(work), kBoxRows);
  if (cute::elect_one_sync()) {
    auto at = stage;
    for (int done = 0; done < records; done += Config::kRecords, ++at) {
      int const count = min(records - done, Config::kRecords);
      shared.empty[at.stage].wait(at.phase ^ 1);
      sm90::Barrier& full = shared.full[at.stage];
      full.arrive_and_expect_tx(count * boxes * kBoxRows * kRowBytes);
      sm90::BoxLoader<Config::kCluster> const loader(full.address(), rank);
      for (int record = 0; record < count; ++record) {
        uint8_t* const to = shared.rows[at.stage][record];
        int const column = (first + done + record) * kSide;
        for (int box = 0; box < boxes; ++box) {
          loader.load(params.row_boxes, to + box * kBoxRows * kRowBytes, box, /*shared=*/true,
                      column, row + box * kBoxRows, 0);
        }
      }
    }
  }
  stage += ceil_div(records, Config::kRecords);
}

}  // namespace jgg::packed
