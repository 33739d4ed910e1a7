// The problem out[group] = lhs[rows of group, m]^T . rhs[rows of group, n]: where its tiles and
// operands lie in memory.
#pragma once

#include "ragged/hints.h"
#include "ragged/ragged_dot.h"
#include "ragged/tiles.h"
#include "ragged/zeros.h"
#include "scheduler/ragged_schedule.h"
#include "sm90/config.h"
#include "sm90/epilogue/cooperative.h"
#include "sm90/gather.h"
#include "sm90/tma/views.h"

namespace jgg::sm90 {

// With `kAdds_`, tiles are added to the previous float32 result. With `kGathersLhs_`, rows of lhs
// lie anywhere in memory, and each CTA loads all of its rows itself (sm90/gather.h).
template <class Config_, bool kAdds_ = false, bool kGathersLhs_ = false>
struct RaggedContracting {
  using Config = Config_;
  using Epilogue = CooperativeEpilogue<Config>;
  static constexpr bool kAdds = kAdds_;
  static constexpr bool kGathersLhs = kGathersLhs_;
  static constexpr bool kGathersOwnRows = kGathersLhs;
  static_assert(!kAdds || std::is_same_v<typename Config::Output, float>);
  // No operand may be contiguous along the ragged dimension. Otherwise boxes would start and end at
  // multiples of 16 bytes, and stages would hold rows of other groups.
  static_assert(Config::kLhsMajor == Major::kMN && Config::kRhsMajor == Major::kMN);
  static constexpr int kEarlyReleaseSteps = kAllSteps;
  static constexpr bool kKeepsStep = false;
  static constexpr bool kSpreadsStores = true;
  // Clusters that take units in turn read the rows of a group at the same time, and so from the
  // same pages of device memory. Even ranges are faster only if rows are gathered, because these
  // rows are in L2.
  template <class Warp>
  using Schedule = ContractingSchedule<Warp, Config::kTileM, Config::kTileN, Config::kTileK,
                                       Config::kCluster, /*kAlign=*/1, /*kPad=*/1,
                                       std::conditional_t<kGathersLhs, EvenRanges, RoundRobin>>;
  template <class Warp>
  using Turns = EarliestFree<Warp, kMaxClusters<Config>>;

  struct Params {
    CUtensorMap lhs;
    CUtensorMap rhs;
    CUtensorMap out;
    GroupSizes groups;
    ContractingGrid<Config::kTileM, Config::kTileN, Config::kTileK, Config::kCluster> grid;
    GatheredRows rows;
    int m;
    int n;
    int lhs_batched;
    int rhs_batched;
    bool rhs_in_slabs;
    StoreHint store_hint;
    int early_steps;  // steps that release their stages early: sm90/config.h
  };

  template <class Warp>
  __device__ static Schedule<Warp> schedule(Params const& params) {
    return Schedule<Warp>(params.groups, params.grid);
  }

  __device__ static int rows_left(Params const& params, WorkTile const& work) {
    return params.m - work.m;
  }

  __device__ static int columns_needed(Params const& params, WorkTile const& work) {
    return columns_to_load<Config>(params.n, work.n);
  }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    loader.load(params.lhs, to, box, shared, work.m + row, kRaggedRows - work.extent + k,
                kRaggedRows, end(params, work, params.lhs_batched));
  }

  // Returns the index of the row of memory that is row `row` of the group. Rows past the group's
  // last row are copies of the last row, because boxes of zeros are slower. Products with these
  // copies are zero, because rhs has zeros past the group's last row. Only an infinity in the last
  // row makes NaN.
  __device__ static int gathered_index(Params const& params, WorkTile const& work, int row) {
    return params.rows.of[work.begin + min(row, work.extent - 1)];
  }
  __device__ static int gathered_row(Params const& params, int index) {
    return params.rows.row(index);
  }

  // Returns the descriptor of the rows of memory, whose boxes have one row.
  __device__ static CUtensorMap const& gathered(Params const& params) { return params.lhs; }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    load_rhs(params, params.rhs, work, k, column, loader, to, box, shared);
  }
  template <class Loader>
  __device__ static void load_rhs(Params const& params, CUtensorMap const& rhs,
                                  WorkTile const& work, int k, int column, Loader const& loader,
                                  uint8_t* to, int box, bool shared) {
    int const n = work.n + column, row = kRaggedRows - work.extent + k;
    int const group_end = end(params, work, params.rhs_batched);
    if (params.rhs_in_slabs) {
      loader.load(rhs, to, box, shared, 0, row, kRaggedRows, group_end, n / Config::kSlab);
    } else {
#pragma unroll
      for (int slab = 0; slab < Config::kRhsBoxColumns; slab += Config::kSlab) {
        loader.load(rhs, to + slab / Config::kSlab * Config::kSlabBytes, box, shared, n + slab, row,
                    kRaggedRows, group_end);
      }
    }
  }

  __device__ static StoreHint store_hint(Params const& params) { return params.store_hint; }
  // Returns whether the tile has products to add to the old result.
  __device__ static bool adds_to(WorkTile const& work) { return work.k_tiles > 0; }

  __device__ static StoreCoordinates store_at(Params const& params, WorkTile const& work, int row) {
    return {work.n, work.m + row, work.batch * params.groups.local_groups + work.group};
  }

  static cudaError_t make_params(RaggedDotArguments const& arguments, Params& params) {
    auto const& a = arguments;
    params.groups = a.groups;
    params.grid = {params.groups, a.k, a.n, kFewRows, hot_times_mean(kGathersLhs)};
    params.m = a.k;
    params.n = a.n;
    params.lhs_batched = a.lhs_batched;
    params.rhs_batched = a.rhs_batched;
    params.rhs_in_slabs = a.n % Config::kSlab == 0;
    params.store_hint = result_hint(params.groups);
    // Groups of few rows spend their time on writing results, and early loads would delay the
    // writes.
    params.early_steps = has_few_rows(params.groups) ? kNoSteps : kAllSteps;
    params.rows = a.rows;

    TensorView const lhs =
        operand_view<typename Config::Element>(a.lhs, /*contracted_is_contiguous=*/false);
    TensorView const rhs =
        operand_view<typename Config::Element>(a.rhs, /*contracted_is_contiguous=*/false);
    cudaError_t status = kGathersLhs ? encode_rows(&params.lhs, lhs, a.rows.tokens, a.k)
                                     : encode_ragged_load(&params.lhs, lhs, a.k, Config::kTileK);
    if (status != cudaSuccess) return status;
    if (params.rhs_in_slabs) {
      // One multicast of 16 KB is much faster than two of 8 KB.
      status = encode_ragged_load_slabs(&params.rhs, rhs, a.n, Config::kRhsBoxDepth,
                                        Config::kRhsBoxColumns / Config::kSlab);
    } else {
      status = encode_ragged_load(&params.rhs, rhs, a.n, Config::kRhsBoxDepth);
    }
    if (status != cudaSuccess) return status;
    return encode_plain(&params.out, view<typename Config::Output>(a.out),
                        int64_t(a.groups.batches) * a.groups.local_groups, a.k, a.n,
                        kRowsPerConsumer);
  }

  // Returns the columns of the result, or of both results together if a launch has two.
  static int columns(RaggedDotArguments const& a) { return a.n; }
  static ResultMatrices results(RaggedDotArguments const& a) {
    return result_matrices<typename Config::Output>(a.k, a.n, a.out);
  }

  static int64_t max_units(RaggedDotArguments const& a) {
    return int64_t(a.groups.batches) * a.groups.local_groups * ceil_div(a.k, Config::kTileM) *
           ceil_div(a.n, Config::kTileN);
  }

 private:
  // Returns the row after the group, in an operand whose batches follow each other in memory.
  __device__ static int end(Params const& params, WorkTile const& work, int batched) {
    return work.batch * batched * params.groups.rows + work.begin + work.extent;
  }
};

}  // namespace jgg::sm90
