// The roles of float32 kernels for groups of few rows: a thread copies weights, a warpgroup brings
// rows in parts, and two warpgroups multiply and store.
#pragma once

#include "sm90/mainloop/swapped_split.h"
#include "sm90/tile_roles.h"

namespace jgg::sm90 {

// Stores a consumer's 64 columns of a tile. Each warp has 16 of them, and each lane two. In every 8
// rows, a lane has rows 2 (lane % 4) and 2 (lane % 4) + 1 of its columns.
template <class Config, int kSums>
__device__ void store_swapped(float const (&sums)[kSums], float* out, int pitch, int rows,
                              int columns, int consumer) {
  int const warp = threadIdx.x % kWarpgroup / kWarpSize, lane = threadIdx.x % kWarpSize;
  int const column = consumer * kColumnsPerConsumer + warp * 16 + column_of_lane();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    int const row = i / 4 * 8 + lane % 4 * 2 + i % 2, at = column + i / 2 % 2 * 8;
    if (row < rows && at < columns) out[int64_t(row) * pitch + at] = sums[i];
  }
}

template <class Problem>
struct SwappedSplitRoles : TileRoles<Problem> {
  static_assert(SwappedSplitProblem<Problem>);
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SwappedSplitStorage<Config>;
  using Mainloop = SwappedSplitMainloop<Problem>;
  static constexpr Registers kRegisters{40, 192, 88};
  static constexpr int kThreads = (2 + kConsumers) * kWarpgroup;

  __device__ static void initialize(Params const&, Shared& shared) {
    constexpr int kRowWarps = kRowThreads / kWarpSize;
    if (threadIdx.x == 0) {
      set_arrivals(shared.weights_full, 1);
      set_arrivals(shared.rows_full, kRowWarps);
      set_arrivals(shared.empty, kConsumers * kWarpgroup / kWarpSize);
      initialize_work(shared, 1 + kRowWarps);
      fence_barriers();
    }
  }

  __device__ static void load(Params const& params, Shared& shared, int) {
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      Mainloop::load_weights(params, work, shared, stage);
    });
  }

  __device__ static void assist(Params const& params, Shared& shared) {
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      Mainloop::bring_rows(params, work, shared, stage);
    });
  }

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      int const rows = rows_of<Config>(work);
      auto const compute = [&](auto most_rows) {
        typename Mainloop::template Sums<most_rows.value> sums = {};
        Mainloop::template multiply<most_rows.value>(work, shared, stage, consumer, sums);
        store_swapped<Config>(sums, Problem::out_at(params, work), params.n, rows,
                              params.n - work.n, consumer);
      };
      with_rows<Config::kTileM>(uniform(rows), compute);
    });
  }
};

}  // namespace jgg::sm90
