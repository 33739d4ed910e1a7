// The mainloop of the consumers for products of float16 parts.
#pragma once

#include "sm90/float16_parts.h"
#include "sm90/mainloop/cooperative.h"

namespace jgg::sm90 {

// WGMMA truncates each partial sum instead of rounding it, so all errors are towards zero. Over
// thousands of steps they add up to several times the error of a rounded float32 sum. The products
// of high parts therefore start from zero in every step and are added to the totals by ordinary,
// rounded additions. The correction terms are 2^11 times smaller, so the tensor cores may add them
// up.
//
// Totals and a second set of accumulators of the same size would take more registers than there
// are, so such a step multiplies one slice of the columns after the other. While one consumer adds,
// the other one keeps the tensor cores busy.
template <class Problem>
class PartsMainloop : public CooperativeMainloop<Problem> {
  using Base = CooperativeMainloop<Problem>;
  using Config = typename Base::Config;
  using Element = typename Base::Element;
  using Shared = typename Base::Shared;
  using Stage = typename Base::Stage;
  using Params = typename Base::Params;

  static constexpr int kMostSliceColumns = 128;

 public:
  // Sets totals to the tile's product, or to its first columns.
  template <class Totals, class Overlap>
  __device__ static void multiply(Params const& params, WorkTile const& work, Shared& shared,
                                  Stage& stage, int consumer, Totals& totals, Overlap&& overlap) {
    int const exponent = -scale_exponent(Problem::lhs_maximum(params, work)) -
                         scale_exponent(Problem::rhs_maximum(params, work));
    int const segment = Problem::steps(params, work);
    bool const corrected = work.k_tiles > segment;
    int const in_tensor_cores = corrected ? work.k_tiles - segment : segment;
    accumulate(work, segment, in_tensor_cores, shared, stage, consumer, totals, overlap);
    if (corrected) {
#pragma unroll
      for (int i = 0; i < cute::size(totals); ++i) {
        // Drop a correction that is not finite. It comes from infinity times a low part, which may
        // be zero or of the other sign. The products of high parts then give the result.
        totals(i) = isfinite(totals(i)) ? totals(i) * (1 / kLowScale) : 0.0f;
      }
    }
    promote(work, work.k_tiles - in_tensor_cores, shared, stage, consumer, totals);

    // Multiply by two factors whose exponents have the same sign. A single factor may be too large
    // or too small for a float, and so may be a product with the scale of only one operand.
    float const first = power_of_two(exponent / 2);
    float const second = power_of_two(exponent - exponent / 2);
#pragma unroll
    for (int i = 0; i < cute::size(totals); ++i) totals(i) = totals(i) * first * second;
  }

 private:
  // Sets accumulators to the product of `steps` steps, which make up segments of `segment` steps.
  template <class Accumulators, class Overlap>
  __device__ static void accumulate(WorkTile const& work, int segment, int steps, Shared& shared,
                                    Stage& stage, int consumer, Accumulators& accumulators,
                                    Overlap&& overlap) {
    using namespace cute;
    typename Base::template Mma<kColumnsOf<Accumulators>> mma;
    clear(accumulators);
    Stage finished = stage;
    for (int step = 0; step < steps; ++step) {
      enter(work, step < segment ? step : step - segment, shared, stage, consumer);
      warpgroup_fence_operand(accumulators);
      warpgroup_arrive();
      multiply_stage(mma, shared.lhs[stage.stage], shared.rhs[stage.stage], consumer, false,
                     accumulators);
      warpgroup_commit_batch();
      warpgroup_fence_operand(accumulators);
      overlap(step);
      warpgroup_wait<1>();
      if (step > 0) {
        Base::release(shared, finished.stage);
        ++finished;
      }
      ++stage;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulators);
    Base::release(shared, finished.stage);
  }

  // totals += the product of `steps` steps, rounded.
  template <class Totals>
  __device__ static void promote(WorkTile const& work, int steps, Shared& shared, Stage& stage,
                                 int consumer, Totals& totals) {
    using namespace cute;
    constexpr int kColumns = kColumnsOf<Totals>;
    constexpr int kSliceColumns = kColumns < kMostSliceColumns ? kColumns : kMostSliceColumns;
    constexpr int kSlices = kColumns / kSliceColumns;
    typename Base::template Mma<kSliceColumns> mma;
    auto accumulators =
        partition_fragment_C(mma, Shape<Int<kRowsPerConsumer>, Int<kSliceColumns>>{});
    for (int step = 0; step < steps; ++step, ++stage) {
      enter(work, step, shared, stage, consumer);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        warpgroup_fence_operand(accumulators);
        warpgroup_arrive();
        multiply_stage(mma, shared.lhs[stage.stage],
                       shared.rhs[stage.stage] + slice * kSliceColumns * Config::kTileK, consumer,
                       true, accumulators);
        warpgroup_commit_batch();
        warpgroup_fence_operand(accumulators);
        warpgroup_wait<0>();
        warpgroup_fence_operand(accumulators);
        if (slice + 1 == kSlices) Base::release(shared, stage.stage);
#pragma unroll
        for (int i = 0; i < size(accumulators); ++i) {
          totals(slice * size(accumulators) + i) += accumulators(i);
        }
      }
    }
  }

  // Waits for a stage.
  __device__ static void enter(WorkTile const&, int, Shared& shared, Stage const& stage, int) {
    shared.full[stage.stage].wait(stage.phase);
  }

  // Adds the product of the operands in one stage to the accumulators, or overwrites them if
  // `from_zero`. `rhs` points to the first of the columns to multiply.
  template <class Mma, class Accumulator>
  __device__ static void multiply_stage(Mma& mma, Element* lhs, Element* rhs, int consumer,
                                        bool from_zero, Accumulator& accumulators) {
    using namespace cute;
    constexpr int kColumns = tile_size<1>(Mma{});
    auto const lhs_tile =
        make_tensor(make_smem_ptr(lhs + consumer * kRowsPerConsumer * Config::kTileK),
                    typename Base::template SmemLayout<Config::kLhsMajor, kRowsPerConsumer>{});
    auto const rhs_tile = make_tensor(
        make_smem_ptr(rhs), typename Base::template SmemLayout<Config::kRhsMajor, kColumns>{});
    auto const thread_mma = mma.get_slice(threadIdx.x % kWarpgroup);
    auto const lhs_fragment = thread_mma.make_fragment_A(thread_mma.partition_A(lhs_tile));
    auto const rhs_fragment = thread_mma.make_fragment_B(thread_mma.partition_B(rhs_tile));
    issue_step(mma, lhs_fragment, rhs_fragment, from_zero, accumulators);
  }
};

}  // namespace jgg::sm90
