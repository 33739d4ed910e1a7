// out[m, n] = lhs[m, k] . rhs[group of row m]: coordinates of its tiles in memory.
#pragma once

#include "scheduler/ragged_schedule.h"
#include "sm90/epilogue.h"
#include "sm90/kernel_config.h"
#include "sm90/problem_arguments.h"

namespace jgg::sm90 {

template <class Config_>
struct RaggedNoncontracting {
  using Config = Config_;
  // TMA boxes start at multiples of 16 bytes of the contiguous dimension, groups at any row.
  static_assert(Config::kLhsMajor == cute::GMMA::Major::K, "the rows of lhs are not contiguous");

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
    int store_shift;
  };

  template <class Warp>
  using Schedule = NoncontractingSchedule<Warp, Config::kTileM, Config::kTileN, Config::kTileK,
                                          Config::kCluster>;

  template <class Warp>
  __device__ static Schedule<Warp> schedule(Params const& params) {
    return Schedule<Warp>(params.groups, params.n, params.k);
  }

  __device__ static int rows_left(Params const&, WorkTile const& work) {
    return work.extent - work.m;
  }

  // Rows past the group's end read as zero. They could not reach a row that is stored, but other
  // groups' rows would cost bandwidth, and the tensor cores power.
  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    loader.load(params.lhs, to, box, shared, k, kRaggedRows - work.extent + work.m + row,
                kRaggedRows,
                work.batch * params.lhs_batched * params.groups.rows + work.begin + work.extent);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    int const group = work.batch * params.rhs_batched * params.groups.local_groups + work.group;
    int const n = work.n + column;
    if constexpr (Config::kRhsMajor == cute::GMMA::Major::K) {
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

  __device__ static StoreCoordinates store_at(Params const& params, WorkTile const& work, int row) {
    int const end = work.batch * params.groups.rows + work.begin + work.extent;
    return {work.n, params.store_shift - work.extent + work.m + row, end};
  }

  static cudaError_t make_params(RaggedDotArguments const& arguments, Params& params) {
    auto const& a = arguments;
    params.groups = group_sizes(a);
    params.n = a.n;
    params.k = a.k;
    params.lhs_batched = a.lhs_batched;
    params.rhs_batched = a.rhs_batched;
    params.store_shift = a.m;

    params.rhs_in_slabs = a.n % Config::kSlab == 0;

    TensorView const lhs = view<typename Config::Element>(a.lhs);
    TensorView const rhs = view<typename Config::Element>(a.rhs);
    int const rhs_groups = (a.rhs_batched ? a.batches : 1) * a.local_groups;
    cudaError_t status = encode_ragged_load(&params.lhs, lhs, a.k, kRowsPerConsumer);
    if (status != cudaSuccess) return status;
    if constexpr (Config::kRhsMajor == cute::GMMA::Major::K) {
      status = encode_plain(&params.rhs, rhs, rhs_groups, a.n, a.k, Config::kRhsBoxColumns);
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

  // Units of work cannot be counted without the group sizes, but never pass this.
  static int64_t max_units(RaggedDotArguments const& a) {
    int64_t const row_tiles = ceil_div(a.m, Config::kTileM) + int64_t(a.groups);
    return a.batches * row_tiles * ceil_div(a.n, Config::kTileN);
  }
};

}  // namespace jgg::sm90
