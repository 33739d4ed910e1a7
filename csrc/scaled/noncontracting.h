// The problem out[m, n] = lhs[m, k] . rhs[group of row m][n, k] with scales: where its tiles and
// operands lie in memory.
#pragma once

#include "ragged/group_rows.h"
#include "scaled/views.h"
#include "sm90/scales/loader.h"
#include "sm90/scales/wide.h"

namespace jgg::sm90 {

template <class Config_>
struct ScaledNoncontracting : GroupRows<Config_> {
  using Config = Config_;
  static constexpr bool kHasWideScales = true;

  struct Params {
    CUtensorMap lhs;
    CUtensorMap rhs;
    CUtensorMap out;
    GroupSizes groups;
    RowScales lhs_scales;
    BlockScales rhs_scales;
    bool wide_scales;
    float const* channel_scales;
    int64_t channel_batch_stride;
    ElementType out_type;
    int n;
    int k;
    int lhs_batched;
    int rhs_batched;
    int store_shift;
  };

  // Rows past the group's end only reach rows of the result that are not stored. The descriptor
  // reads them as zeros, which cost neither bandwidth nor power of the tensor cores.
  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    int const end = work.batch * params.lhs_batched * params.groups.rows + work.begin + work.extent;
    loader.load(params.lhs, to, block, shared, block * Config::kTileK,
                kRaggedRows - work.extent + work.m, kRaggedRows, end);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    int const group = work.batch * params.rhs_batched * params.groups.local_groups + work.group;
    loader.load(params.rhs, to, block, shared, block * Config::kTileK, work.n, group);
  }

  __device__ static void load_scales(Params const& params, WorkTile const& work, int block,
                                     float* to_lhs, float* to_rhs) {
    RowScales const& lhs = params.lhs_scales;
    ScaleLoader::copy_rows<Config::kTileM>(
        lhs, lhs.data + work.batch * lhs.batch_stride + int64_t(block) * lhs.block_stride,
        work.begin + work.m, params.groups.rows - 1, to_lhs);
    float const* rhs = own_rhs_scales(params, work);
    if (!rhs) return;
    ScaleLoader::copy(to_rhs + threadIdx.x % kScaleThreads,
                      rhs + int64_t(block) * params.rhs_scales.block_stride);
  }

  // Returns the first step of a tile, which is 0 for whole tiles.
  __device__ static int first_step(WorkTile const&) { return 0; }

  // Returns the scales of four K tiles from `block` on, which is a multiple of four.
  __device__ static WideScales<Config> wide_scales(Params const& params, WorkTile const& work,
                                                   int block) {
    RowScales const& lhs = params.lhs_scales;
    int const row = work.begin + work.m;
    return {lhs.data + work.batch * lhs.batch_stride + int64_t(row) * lhs.row_stride + block,
            lhs.row_stride,
            params.groups.rows - 1 - row,
            own_rhs_scales(params, work),
            params.rhs_scales.block_stride != 0,
            block};
  }

  // Multiplies by the scales that do not change along K, once at the end of a tile.
  template <class Sums>
  __device__ static void finish(Params const& params, WorkTile const& work, Sums& sums) {
    if (!params.channel_scales) return;
    float const* scales = params.channel_scales + work.batch * params.channel_batch_stride +
                          int64_t(work.group) * params.n;
    int const first = work.n + threadIdx.x % 4 * 2;
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < Config::kMmaN / 2; ++i) {
        int const column = first + slice * Config::kMmaN + i / 4 * 8 + i % 2;
        sums[slice][i] *= column < params.n ? __ldg(scales + column) : 0.0f;
      }
    }
  }

  // Returns the address of the scales that this thread loads for the first K tile, or null for
  // threads that load none.
  __device__ static float const* own_rhs_scales(Params const& params, WorkTile const& work) {
    BlockScales const& rhs = params.rhs_scales;
    int const i = threadIdx.x % kScaleThreads;
    if (i >= Config::kRhsScales || !rhs.data) return nullptr;
    int const last = (params.n - 1) / kScaleBlock;
    int const column = min((work.n + i * Config::kScaleColumns) / kScaleBlock, last);
    return rhs.data + work.batch * rhs.batch_stride + work.group * rhs.group_stride +
           int64_t(column) * rhs.column_block_stride;
  }

  static cudaError_t make_params(ScaledArguments const& a, Params& params) {
    params.groups = a.groups;
    params.lhs_scales = a.lhs_scales;
    params.rhs_scales = a.rhs_scales;
    params.wide_scales = WideScales<Config>::suit(a.lhs_scales, a.rhs_scales);
    params.channel_scales = a.channel_scales;
    params.channel_batch_stride = a.channel_batch_stride;
    params.out_type = a.out_type;
    params.n = a.n;
    params.k = a.k;
    params.lhs_batched = a.lhs_batched;
    params.rhs_batched = a.rhs_batched;
    params.store_shift = a.m;

    int const rhs_groups = (a.rhs_batched ? a.groups.batches : 1) * a.groups.local_groups;
    cudaError_t status =
        encode_ragged_load(&params.lhs, view_bytes(a.lhs), a.k, Config::kLhsBoxRows);
    if (status != cudaSuccess) return status;
    status = encode_plain(&params.rhs, view_bytes(a.rhs), rhs_groups, a.n, a.k, Config::kTileN);
    if (status != cudaSuccess) return status;
    return encode_ragged_store(&params.out, view_out(a.out, a.out_type), a.n, Config::kOutBoxRows,
                               params.store_shift);
  }
};

}  // namespace jgg::sm90
