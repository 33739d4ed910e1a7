// One triangle of alpha A A^T or alpha (A B^T + B A^T), or of the Hermitian forms: its tiles, and
// the factors of each tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fp64/kernel_config.h"
#include "fp64/loader.h"
#include "fp64/rank_k.h"
#include "scheduler/triangular_runs.h"

namespace jgg::fp64 {

template <class Config_>
struct RankKProblem {
  using Config = Config_;
  using Element = typename Config::Element;
  using Tile = TriangularTile;
  using Schedule = TriangularRunSchedule<Config::kTile>;

  // The most stacks of a launch.
  static constexpr int kMaxStacks = 64;

  // A number for each matrix, or one for all.
  struct Scales {
    Element const* values;
    int stride;

    __device__ Value<Element> at(int matrix) const { return widen(values[matrix * stride]); }
  };

  struct Stack {
    Element const* a;
    Element const* b;
    Element* out;
    Scales alpha;
    Scales beta;
    int n;
    int k;
  };

  struct Params {
    Stack stacks[kMaxStacks];
    TriangularRun runs[2 * kMaxStacks];
    int run_count;
    int units;
    bool two_products;
    bool hermitian;
    bool adds_c;
    Uplo uplo;
    OtherTriangle other;
  };

  // Returns the block's tile of a round. Past the block's last tile, it returns a tile without
  // steps.
  __device__ static Tile tile(Params const& params, int round) {
    Schedule const schedule(params.runs, params.run_count, params.units, params.uplo);
    return schedule.tile(round, blockIdx.x, gridDim.x);
  }

  // Returns the number of a tile's products. The second product of a rank-2k update is the
  // transpose of the first. A tile on the diagonal has the mirror images of its elements, so it
  // needs only the first product.
  __device__ static int products(Params const& params, Tile const& tile) {
    return params.two_products && !tile.diagonal ? 2 : 1;
  }

  __device__ static Panels<Element> panels(Params const& params, Tile const& tile, int product) {
    Stack const& stack = params.stacks[tile.stack];
    int64_t const before = int64_t(tile.matrix) * stack.n * stack.k;
    Element const* const a = stack.a + before;
    Element const* const b = stack.b + before;
    return {
        {product == 0 ? a : b, tile.m, stack.n}, {product == 0 ? b : a, tile.n, stack.n}, stack.k};
  }

  // Fills in the parameters of `count` stacks from `stacks` on.
  static void make_params(RankKArguments const& arguments, RankKStack const* stacks, int count,
                          Params& params) {
    params.two_products = stacks->b != nullptr;
    params.hermitian = arguments.hermitian;
    params.adds_c = arguments.adds_c;
    params.uplo = arguments.uplo;
    params.other = arguments.other;
    std::vector<TriangularWork> work;
    for (int i = 0; i < count; ++i) {
      RankKStack const& from = stacks[i];
      auto const elements = [](void const* data) { return static_cast<Element const*>(data); };
      params.stacks[i] = {elements(from.a),
                          elements(from.b ? from.b : from.a),
                          static_cast<Element*>(from.out),
                          {elements(from.alpha), from.alpha_stride},
                          {elements(from.beta), from.beta_stride},
                          from.n,
                          from.k};
      int const steps = ceil_div(from.k, Config::kTileK);
      work.push_back({from.matrices, from.n, params.two_products ? 2 * steps : steps, steps});
    }
    std::vector<TriangularRun> const runs = Schedule::runs(work, params.units);
    params.run_count = static_cast<int>(runs.size());
    std::copy(runs.begin(), runs.end(), params.runs);
  }
};

}  // namespace jgg::fp64
