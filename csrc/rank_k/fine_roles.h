// The roles of symmetric updates in fine tiles, with one thread block for each tile. One thread
// loads operands. Two warpgroups multiply and store, and share the squares of a diagonal unit.
#pragma once

#include "rank_k/fine_epilogue.h"
#include "rank_k/rank_k.h"
#include "sm90/mainloop/fine.h"
#include "sm90/roles.h"

namespace jgg::sm90 {

// The share of a consumer in a unit: the products of one strip with both strips of a tile. In a
// diagonal unit, one of the consumers also computes a square on the diagonal.
struct ConsumerShare {
  Strip row;
  Strip columns;
  bool has_square;
  Strip square;

  // A diagonal unit has four rows of squares of 64 x 64, with four, three, two and one square. The
  // lhs has the two longer rows, and the rhs the two shorter rows:
  //
  //   half 0  the left and the right half of the longest row, and the shortest row
  //   half 1  the left half of the second longest row and its square on the diagonal, and the
  //           second shortest row
  __device__ ConsumerShare(int consumer, bool is_diagonal, int half, Uplo uplo) {
    int const longer = uplo == Uplo::kLower ? 1 : 0, shorter = 1 - longer;
    row = {false, is_diagonal ? longer : consumer};
    columns = {true, 0};
    has_square = is_diagonal && consumer != half;
    square = {half == 0, shorter};
    if (is_diagonal && half == 0) columns.in_rhs = consumer == 0;
    if (is_diagonal && half == 1) row = consumer == 0 ? square : Strip{true, longer};
  }
};

template <class Problem, class Loop, bool kPlain, class Shared>
__device__ void consume_fine(typename Problem::Params const& params, WorkTile const& work, int rank,
                             Shared& shared, StageIterator<Problem::Config::kStages>& stage,
                             int consumer) {
  using Row = typename Loop::template FirstColumns<2 * kRowsPerConsumer>;
  using Square = typename Loop::template FirstColumns<kRowsPerConsumer>;
  ConsumerShare const share(consumer, work.share == Share::kBoth, rank, params.uplo);
  FineEpilogue<Problem, kPlain> const epilogue(shared, params, work, consumer);
  int const first_row = share.row.row(work), first_column = share.columns.row(work);
  auto const overlap = [&] { epilogue.store_zeros(first_row, first_column, 2); };
  Row row;
  Square square;
  StripProduct<Row> const product{share.row, share.columns, row};
  if (share.has_square) {
    Loop::multiply(params, work, shared, stage, overlap, product,
                   StripProduct<Square>{share.square, share.square, square});
    epilogue.store(square, share.square.row(work), share.square.row(work));
  } else {
    Loop::multiply(params, work, shared, stage, overlap, product);
  }
  epilogue.store(row, first_row, first_column);
}

// These kernels are so short that half of their time passes before all is set up. They have to read
// their instructions first, so there are few instructions before the first loads, and `kPlain`
// results (no C, zeros in the other triangle) have a kernel without the code for other results.
// Finding the tile takes longer than setting up the cluster's barriers, so warps find it before
// they wait for the barriers.
template <class Problem, class Loop, bool kPlain>
struct FineRoles {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;
  using Shared = SharedStorage<Config>;
  // The warpgroups that multiply, and the warp of the thread that copies.
  static constexpr int kThreads = kConsumers * kWarpgroup + kWarpSize;
  static constexpr int kBlocks = 1;
  static_assert(sizeof(Params) <= kParameterLimit);

  __device__ __forceinline__ static void run(Params const& params, Shared& shared, int rank) {
    int const warpgroup = uniform(threadIdx.x / kWarpgroup);
    bool const produces = warpgroup == kConsumers;
    if (produces && cute::elect_one_sync()) {
      Problem::prefetch_descriptors(params);
      set_arrivals(shared.full, 1);
      set_arrivals(shared.empty, Loop::kEmptyArrivals);
      fence_barriers();
      // This fence is for the copies, which will signal the barriers.
      fence_async_proxy();
    }
    __syncwarp();
    arrive_at_cluster();

    // Each warp finds the tile itself, because that is faster than to get it from another warp.
    typename Problem::Triangle const triangle(params.stacks, params.count, params.uplo);
    StageIterator<Config::kStages> stage;
    WorkTile work;
    triangle.tile(blockIdx.x / Config::kCluster, rank, work);
    if (params.one_product && work.share == Share::kBoth) work.k_tiles *= 2;
    // After this, all barriers of the cluster are ready.
    wait_for_cluster();
    if (produces) Loop::load(params, work, rank, shared, stage);
    // Keeps the compiler from moving the loads to the end of the kernel's code.
    __syncwarp();
    if (!produces) {
      consume_fine<Problem, Loop, kPlain>(params, work, rank, shared, stage, warpgroup);
    }
  }
};

}  // namespace jgg::sm90
