// The problem out[m, n] = lhs[m, k] . rhs[group of row m]: where its tiles and operands lie in
// memory.
#pragma once

#include <algorithm>

#include "ragged/group_rows.h"
#include "ragged/ragged_dot.h"
#include "ragged/tiles.h"
#include "sm90/config.h"
#include "sm90/epilogue/cooperative.h"
#include "sm90/gather.h"
#include "sm90/lockstep.h"
#include "sm90/tma/load.h"
#include "sm90/tma/views.h"

namespace jgg::sm90 {

// With `kGathersLhs_`, rows of lhs lie anywhere in memory. With `kGathersOwnRows_` too, each CTA
// loads all of its rows itself (sm90/gather.h).
template <class Config_, bool kGathersLhs_ = false, bool kGathersOwnRows_ = false>
struct RaggedNoncontracting : GroupRows<Config_, kGathersLhs_ && !kGathersOwnRows_> {
  using Config = Config_;
  using Epilogue = CooperativeEpilogue<Config>;
  static constexpr bool kGathersLhs = kGathersLhs_;
  static constexpr bool kGathersOwnRows = kGathersOwnRows_;
  // lhs may not be contiguous along the ragged dimension m. Otherwise boxes would start at
  // multiples of 16 bytes, and stages would hold rows of the previous group.
  static_assert(Config::kLhsMajor == Major::kK);
  static constexpr bool kAdds = false;
  static constexpr int kEarlyReleaseSteps = kFirstSteps;
  static constexpr bool kKeepsStep = true;
  static constexpr bool kSpreadsStores = true;
  static constexpr bool kHasSmallBoxes = kIsNarrow<Config> && Config::kRhsMajor == Major::kK;

  struct Params {
    CUtensorMap lhs;
    CUtensorMap rhs;
    CUtensorMap out;
    GroupSizes groups;
    int n;
    int k;
    int lhs_batched;
    int rhs_batched;
    bool rhs_in_slabs;
    int rhs_box_columns;  // used if kHasSmallBoxes
    LoadHint rhs_hint;
    bool keeps_step;
    int store_shift;
    GatheredRows rows;
  };

  // Returns whether clusters keep step in this tile. They do not keep step in pieces, because
  // pieces come last, and clusters have different numbers of pieces. They do not keep step in
  // unowned rows, because these take no time.
  __device__ static bool is_whole(Params const& params, WorkTile const& work) {
    return work.k_tiles >= ceil_div(params.k, Config::kTileK);
  }

  __device__ static int columns_needed(Params const& params, WorkTile const& work) {
    return columns_to_load<Config>(params.n, work.n);
  }

  // Rows past the group's end only reach rows of the result that are not stored. The descriptor
  // reads them as zeros, which cost neither bandwidth nor power of the tensor cores.
  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    int const batch = work.batch * params.lhs_batched;
    loader.load(params.lhs, to, box, shared, k, kRaggedRows - work.extent + work.m + row,
                kRaggedRows, batch * params.groups.rows + work.begin + work.extent);
  }

  // Returns the number of the row of memory that is row `row` of the group, or -1 past the group's
  // last row. With `kGathersOwnRows`, rows past the last row are copies of the last row, because
  // boxes of zeros are slower. Their results are not stored.
  __device__ static int gathered_index(Params const& params, WorkTile const& work, int row) {
    if constexpr (kGathersOwnRows) row = std::min(row, work.extent - 1);
    return row < work.extent ? params.rows.of[work.begin + row] : -1;
  }
  __device__ static int gathered_row(Params const& params, int index) {
    return params.rows.row(index);
  }

  // Returns the descriptor of the rows of memory, whose boxes have one row.
  __device__ static CUtensorMap const& gathered(Params const& params) { return params.lhs; }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& plain, uint8_t* to, int box, bool shared) {
    Loader const loader = plain.with(params.rhs_hint);
    int const group = work.batch * params.rhs_batched * params.groups.local_groups + work.group;
    int const n = work.n + column;
    if constexpr (Config::kRhsMajor == Major::kK) {
      loader.load(params.rhs, to, box, shared, k, n, group);
    } else if (params.rhs_in_slabs) {
      loader.load(params.rhs, to, box, shared, 0, k, n / Config::kSlab, group);
    } else {
#pragma unroll
      for (int slab = 0; slab < Config::kRhsBoxColumns; slab += Config::kSlab) {
        loader.load(params.rhs, to + slab / Config::kSlab * Config::kSlabBytes, box, shared,
                    n + slab, k, group);
      }
    }
  }

  static cudaError_t make_params(RaggedDotArguments const& arguments, Params& params) {
    auto const& a = arguments;
    params.groups = a.groups;
    params.n = a.n;
    params.k = a.k;
    params.lhs_batched = a.lhs_batched;
    params.rhs_batched = a.rhs_batched;
    params.store_shift = a.groups.rows;
    params.rows = a.rows;

    params.rhs_in_slabs = a.n % Config::kSlab == 0;
    params.rhs_hint = Config::kRhsMajor == Major::kMN && streams_weights(a) ? LoadHint::kEvictFirst
                                                                            : LoadHint::kNormal;
    params.keeps_step = ceil_div(a.k, Config::kTileK) >= kLockstepSteps &&
                        a.groups.rows / a.groups.groups > kLockstepRows;

    TensorView const lhs =
        operand_view<typename Config::Element>(a.lhs, /*contracted_is_contiguous=*/true);
    TensorView rhs = operand_view<typename Config::Element>(a.rhs, Config::kRhsMajor == Major::kK);
    if (streams_weights(a) && a.groups.rows > kDecodingRows * a.groups.groups)
      rhs.fetch = kFetchBox;
    int const rhs_groups = (a.rhs_batched ? a.groups.batches : 1) * a.groups.local_groups;
    cudaError_t status = kGathersLhs ? encode_rows(&params.lhs, lhs, a.rows.tokens, a.k)
                                     : encode_ragged_load(&params.lhs, lhs, a.k, kRowsPerConsumer);
    if (status != cudaSuccess) return status;
    if constexpr (Config::kRhsMajor == Major::kK) {
      // Half of the result's columns, rounded up to whole atoms of the swizzle.
      constexpr int kAtom = 8;
      int const half = ceil_div(a.n, 2 * kAtom) * kAtom;
      params.rhs_box_columns =
          kHasSmallBoxes ? std::min(half, Config::kRhsBoxColumns) : Config::kRhsBoxColumns;
      status = encode_plain(&params.rhs, rhs, rhs_groups, a.n, a.k, params.rhs_box_columns);
    } else if (params.rhs_in_slabs) {
      // One multicast of 16 KB is much faster than two of 8 KB.
      status = encode_slabs(&params.rhs, rhs, rhs_groups, a.k, a.n, Config::kTileK,
                            Config::kRhsBoxColumns / Config::kSlab);
    } else {
      status = encode_plain(&params.rhs, rhs, rhs_groups, a.k, a.n, Config::kTileK);
    }
    if (status != cudaSuccess) return status;
    return encode_ragged_store(&params.out, view<typename Config::Output>(a.out), a.n,
                               kRowsPerConsumer, params.store_shift);
  }

  // With at most this many rows per group, L2 fetches weights [n, k] two boxes at a time, which is
  // 2 % faster.
  static constexpr int64_t kDecodingRows = 64;

  // Returns whether groups have so few tiles, and tiles so many steps, that no weight is read
  // again. Weights [k, n] are then the first to be evicted from L2, which is up to 2 % faster. For
  // weights [n, k], early eviction is up to 14 % slower. Instead, with more than kDecodingRows rows
  // per group, L2 fetches these weights one box at a time, which is up to 6 % faster. With few
  // steps, early eviction costs 5 %, and fetching one box at a time costs 1 %.
  static bool streams_weights(RaggedDotArguments const& a) {
    constexpr int kManySteps = 32;
    return has_few_rows(a.groups) && a.accuracy == Accuracy::kTf32 &&
           a.k >= kManySteps * Config::kTileK;
  }
};

}  // namespace jgg::sm90
