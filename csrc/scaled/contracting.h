// The problem out[group] = lhs[m, tokens of group] . rhs[n, tokens of group] with scales: where its
// tiles and operands lie in memory. Tokens are in blocks of one step, [m, 128] and [n, 128], so
// that the rows of a tile are contiguous in each step. rhs has scales for each block, or the same
// scales for all blocks.
//
// Multiplying by two scales that change from step to step takes a fifth of the kernel's time. If
// the scales of one operand do not change, that operand is rhs here, and its scales are applied at
// the end. If the caller's lhs is rhs here, the result is transposed.
//
// Two products with the same rhs are one launch: the rows of the second product follow the rows of
// the first, which are padded to whole tiles.
#pragma once

#include "ragged/hints.h"
#include "scaled/views.h"
#include "scheduler/ragged_schedule.h"
#include "sm90/scales/loader.h"
#include "sm90/tma/store.h"

namespace jgg::sm90 {

template <class Config_>
struct ScaledContracting {
  using Config = Config_;
  static constexpr bool kHasWideScales = false;

  struct Params {
    CUtensorMap lhs[Config::kResults];
    CUtensorMap rhs;
    CUtensorMap out[Config::kResults];
    GroupSizes groups;
    ContractingGrid<Config::kTileM, Config::kTileN, Config::kTileK, Config::kCluster> grid;
    RowScales lhs_scales[Config::kResults];
    float const* column_scales;
    int64_t column_scales_stride;  // between batches
    ElementType out_type;
    int blocks;  // of the ragged dimension
    int m;       // of each product
    int n;
    int second_m;  // where the second product begins
    int lhs_batched;
    int rhs_batched;
    StoreHint store_hint;
  };

  // Groups start at multiples of a step, where their scales start too.
  template <class Warp>
  using Schedule = ContractingSchedule<Warp, Config::kTileM, Config::kTileN, Config::kTileK,
                                       Config::kCluster, /*kAlign=*/1, /*kPad=*/kScaleBlock>;

  template <class Warp>
  using Turns = EarliestFree<Warp, kMaxClusters<Config>>;

  template <class Warp>
  __device__ static Schedule<Warp> schedule(Params const& params) {
    return Schedule<Warp>(params.groups, params.grid);
  }

  __device__ static int rows_left(Params const& params, WorkTile const& work) {
    return params.m - row_of(params, work);
  }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    loader.load(params.lhs[is_second(params, work)], to, block, shared, 0, row_of(params, work),
                block_at(params, work, block, params.lhs_batched));
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    loader.load(params.rhs, to, block, shared, 0, work.n,
                block_at(params, work, block, params.rhs_batched));
  }

  __device__ static void load_scales(Params const& params, WorkTile const& work, int block,
                                     float* to_lhs, float* to_rhs) {
    RowScales const& lhs = params.lhs_scales[is_second(params, work)];
    // TMA reads blocks past the last one as zeros. Such blocks take the scales of the last block,
    // because scales must be read from a valid address.
    int const row = min(work.begin / kScaleBlock + block, params.blocks - 1);
    ScaleLoader::copy_rows<Config::kTileM>(
        lhs, lhs.data + work.batch * lhs.batch_stride + int64_t(row) * lhs.block_stride,
        row_of(params, work), params.m - 1, to_lhs);
    if constexpr (Config::kColumnScales) {
      float const* rhs =
          params.column_scales +
          (int64_t(work.batch) * params.rhs_batched * params.blocks + row) * params.n;
      for (int i = threadIdx.x % kScaleThreads * 4; i < Config::kTileN; i += kScaleThreads * 4) {
        // Rows of scales are multiples of four long, because rows of the result are multiples of 16
        // bytes.
        ScaleLoader::copy4(to_rhs + i, rhs + min(work.n + i, params.n - 4));
      }
    }
  }

  template <class Sums>
  __device__ static void finish(Params const&, WorkTile const&, Sums&) {}

  template <class Epilogue>
  __device__ static void fetch_channel_scales(Params const& params, WorkTile const& work,
                                              Epilogue const& epilogue) {
    epilogue.fetch_scales(params.column_scales + work.batch * params.column_scales_stride, work.n,
                          params.n);
  }

  __device__ static StoreHint store_hint(Params const& params) { return params.store_hint; }

  __device__ static StoreCoordinates store_at(Params const& params, WorkTile const& work, int row) {
    int const group = work.batch * params.groups.local_groups + work.group;
    int const outer = is_second(params, work) ? in_second(group) : group;
    int const first = row_of(params, work) + row;
    if constexpr (Config::kTransposesOut) return {first, work.n, outer};
    return {work.n, first, outer};
  }

  static cudaError_t make_params(ScaledArguments const& a, Params& params) {
    params.groups = a.groups;
    params.second_m = ceil_div(a.m, Config::kTileM) * Config::kTileM;
    params.grid = {a.groups, rows(a), a.n};
    params.column_scales = Config::kColumnScales ? a.column_scales : a.channel_scales;
    params.column_scales_stride = a.channel_batch_stride;
    params.out_type = a.out_type;
    params.blocks = a.k / kScaleBlock;
    params.m = a.m;
    params.n = a.n;
    params.lhs_batched = a.lhs_batched;
    params.rhs_batched = a.rhs_batched;
    params.store_hint = result_hint(a.groups);

    int64_t const results = int64_t(a.groups.batches) * a.groups.local_groups;
    for (int i = 0; i < Config::kResults; ++i) {
      params.lhs_scales[i] = i == 0 ? a.lhs_scales : a.second_lhs_scales;
      cudaError_t status = encode_blocks(&params.lhs[i], i == 0 ? a.lhs : a.second_lhs,
                                         a.lhs_batched, a.m, a, Config::kTileM);
      if (status != cudaSuccess) return status;
      status = encode_plain(&params.out[i], view_out(i == 0 ? a.out : a.second_out, a.out_type),
                            results, Config::kTransposesOut ? a.n : a.m,
                            Config::kTransposesOut ? a.m : a.n, kRowsPerConsumer);
      if (status != cudaSuccess) return status;
    }
    return encode_blocks(&params.rhs, a.rhs, a.rhs_batched, a.n, a, Config::kTileN);
  }

  static int64_t max_units(ScaledArguments const& a) {
    return int64_t(a.groups.batches) * a.groups.local_groups * ceil_div(rows(a), Config::kTileM) *
           ceil_div(a.n, Config::kTileN);
  }

 private:
  // Returns the rows of all products together.
  static int rows(ScaledArguments const& a) {
    if (Config::kResults == 1) return a.m;
    return Config::kResults * ceil_div(a.m, Config::kTileM) * Config::kTileM;
  }

  __device__ static bool is_second(Params const& params, WorkTile const& work) {
    return Config::kResults == 2 && work.m >= params.second_m;
  }
  // Returns the first row of a tile in its own product.
  __device__ static int row_of(Params const& params, WorkTile const& work) {
    return is_second(params, work) ? work.m - params.second_m : work.m;
  }

  static constexpr int kPastAllBlocks = 1 << 30;

  // Returns the index of a tile's block number `block` among the blocks of all batches of an
  // operand.
  __device__ static int block_at(Params const& params, WorkTile const& work, int block,
                                 int batched) {
    int const in_batch = work.begin / kScaleBlock + block;
    return in_batch < params.blocks ? work.batch * batched * params.blocks + in_batch
                                    : kPastAllBlocks;
  }

  static cudaError_t encode_blocks(CUtensorMap* descriptor, void const* data, bool batched,
                                   int rows, ScaledArguments const& a, int box_rows) {
    int64_t const blocks = int64_t(batched ? a.groups.batches : 1) * (a.k / kScaleBlock);
    return encode_plain(descriptor, view_bytes(data), blocks, rows, kScaleBlock, box_rows);
  }
};

}  // namespace jgg::sm90
