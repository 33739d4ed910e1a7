// The kernel of symmetric updates in fine tiles: a thread copies, two warpgroups multiply and
// store, sharing the squares of a diagonal unit.
#pragma once

#include "rank_k/fine_epilogue.h"
#include "rank_k/fine_mainloop.h"
#include "rank_k/rank_k.h"
#include "sm90/list_kernel.h"

namespace jgg::sm90 {

// What a consumer computes of a unit: the products of one strip with both strips of a tile, and of
// a diagonal unit one of the consumers a square on the diagonal besides.
struct ConsumerShare {
  Strip row;
  Strip columns;
  bool has_square;
  Strip square;

  // Of a square of two tiles by two, one tile has the two longer rows and one the shorter ones:
  //
  //   first half   the longest row, left and right; the square on the diagonal of the shortest
  //   second half  the row next to the longest, left, and its square on the diagonal; the row next
  //                to the shortest
  //
  // In the first half the longer rows are those of the lhs, in the second those of the rhs.
  __device__ ConsumerShare(int consumer, bool is_diagonal, int half, Uplo uplo) {
    int const longer = uplo == Uplo::kLower ? 1 : 0, shorter = 1 - longer;
    row = {false, is_diagonal ? longer : consumer};
    columns = {!is_diagonal, 0};
    has_square = is_diagonal && consumer != half;
    square = {true, shorter};
    if (is_diagonal && consumer == 0) {
      if (half == 1) row = square;
      columns.in_rhs = half == 0;
    }
  }
};

template <class Problem, class Loop, class Shared>
__device__ void consume_fine(typename Problem::Params const& params, WorkTile const& work,
                             Shared& shared, StageIterator<Problem::Config::kStages>& stage,
                             int consumer) {
  using Triangle = typename Problem::Triangle;
  using Row = typename Loop::template FirstColumns<2 * kRowsPerConsumer>;
  using Square = typename Loop::template FirstColumns<kRowsPerConsumer>;
  ConsumerShare const share(consumer, Triangle::is_diagonal(work),
                            Triangle::half(work, params.uplo), params.uplo);
  FineEpilogue<Problem> const epilogue(shared, params, work, consumer);
  int const first_row = share.row.row(work), first_column = share.columns.row(work);
  // While the first loads are under way.
  epilogue.store_zeros(first_row, first_column, 2);
  Row row;
  Square square;
  StripProduct<Row> const product{share.row, share.columns, row};
  if (share.has_square) {
    Loop::multiply(params, work, shared, stage, product,
                   StripProduct<Square>{share.square, share.square, square});
    epilogue.store(square, share.square.row(work), share.square.row(work));
  } else {
    Loop::multiply(params, work, shared, stage, product);
  }
  epilogue.store(row, first_row, first_column);
}

template <class Problem, class Loop>
__global__ void __launch_bounds__(kThreads, 1)
    fine_kernel(const __grid_constant__ typename Problem::Params params) {
  using Config = typename Problem::Config;
  static_assert(sizeof(params) <= kParameterLimit);
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = aligned_storage<Config>(dynamic_shared);
  Problem::prefetch_descriptors(params);
  initialize_barriers<Loop>(shared);
  __syncthreads();

  // A block rarely has more than one tile, so each role finds it on its own, sooner than from a
  // warp that schedules.
  typename Problem::Triangle const triangle(params.stacks, params.count, params.uplo);
  StageIterator<Config::kStages> stage;
  WorkTile work;
  int const warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x > 0) return;
    for (int unit = blockIdx.x; triangle.tile(unit, 0, work); unit += gridDim.x) {
      Loop::load(params, work, shared, stage);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    for (int unit = blockIdx.x; triangle.tile(unit, 0, work); unit += gridDim.x) {
      consume_fine<Problem, Loop>(params, work, shared, stage, warpgroup - 1);
    }
  }
}

}  // namespace jgg::sm90
