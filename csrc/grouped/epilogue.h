// The epilogue of products of lists. It scales and adds C, and then stores as the epilogue of the
// ragged products does, but each problem has a result of its own.
#pragma once

#include "sm90/epilogue/cooperative.h"
#include "sm90/epilogue/scale_and_add.h"
#include "sm90/wgmma.h"

namespace jgg::sm90 {

template <class Problem>
class ListEpilogue {
  using Config = typename Problem::Config;
  using Params = typename Problem::Params;

 public:
  __device__ static void initialize(SharedStorage<Config>&) {}

  __device__ ListEpilogue(SharedStorage<Config>& shared, Params const& params, int consumer)
      : store_(shared, params.descriptors[0].out, consumer), params_(params), consumer_(consumer) {}

  __device__ void prefetch(WorkTile const& work) const {
    if (threadIdx.x % kWarpgroup != 0) return;
    int const matrix = Problem::matrix(params_, work);
    if (params_.alphas) asm volatile("prefetch.global.L1 [%0];" ::"l"(params_.alphas + matrix));
    if (params_.betas) asm volatile("prefetch.global.L1 [%0];" ::"l"(params_.betas + matrix));
  }

  // Takes a tile. The previous tile has been stored.
  template <class Accumulators>
  __device__ void take(Accumulators& accumulators, WorkTile const& work) {
    constexpr int kColumns = kColumnsOf<Accumulators>;
    int const matrix = Problem::matrix(params_, work);
    int const n = params_.problems[work.group].n;
    int const row = work.m + consumer_ * kRowsPerConsumer;
    float const alpha = params_.alphas ? params_.alphas[matrix] : params_.alpha;
    float const beta = params_.betas ? params_.betas[matrix] : params_.beta;
    auto const* const out = params_.outs[work.group];
    auto const* const c = out + (int64_t(work.batch) * work.extent + row) * n + work.n;
    scale_and_add(accumulators, alpha, params_.adds_c ? beta : 0.0f, c, n, work.extent - row,
                  n - work.n);
    store_.set_target(params_.descriptors[work.group].out);
    store_.template take<kColumns>(accumulators, {work.n, row, work.batch});
  }

  __device__ void store_early() const {}
  __device__ void store_next() { store_.store_next(); }
  __device__ void store_rest() { store_.store_rest(); }
  __device__ void wait() const { store_.wait(); }

 private:
  CooperativeEpilogue<Config> store_;
  Params const& params_;
  int consumer_;
};

}  // namespace jgg::sm90
