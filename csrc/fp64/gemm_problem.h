// A list of unequal products: their tiles, and the operands of each tile.
#pragma once

#include <algorithm>
#include <vector>

#include "fp64/gemm.h"
#include "fp64/kernel_config.h"
#include "fp64/loader.h"
#include "scheduler/product_runs.h"

namespace jgg::fp64 {

template <class Config_>
struct GemmList {
  using Config = Config_;
  using Element = typename Config::Element;
  using Tile = ProductTile;
  using Schedule = ProductRunSchedule<Config::kTile>;

  // The most problems of a launch.
  static constexpr int kMaxProblems = 128;

  struct Problem {
    Element const* lhs;
    Element const* rhs;
    Element* out;
    Element const* alpha;
    Element const* beta;
    int m;
    int n;
    int k;
  };

  struct Params {
    Problem problems[kMaxProblems];
    ProductRun runs[kMaxProblems];
    int count;
    int units;
    bool adds_c;
  };

  // Returns the block's tile of a round. Past the block's last tile, it returns a tile without
  // steps.
  __device__ static Tile tile(Params const& params, int round) {
    return Schedule(params.runs, params.count, params.units).tile(round, blockIdx.x, gridDim.x);
  }

  __device__ static int products(Params const&, Tile const&) { return 1; }

  __device__ static Panels<Element> panels(Params const& params, Tile const& tile, int) {
    Problem const& problem = params.problems[tile.problem];
    return {{problem.lhs, tile.m, problem.m}, {problem.rhs, tile.n, problem.n}, problem.k};
  }

  // Fills in the parameters of `count` problems from `problems` on.
  static void make_params(GemmArguments const& arguments, GemmProblem const* problems, int count,
                          Params& params) {
    params.adds_c = arguments.adds_c;
    params.count = count;
    std::vector<ProductRun> runs;
    for (int i = 0; i < count; ++i) {
      GemmProblem const& from = problems[i];
      auto const elements = [](void const* data) { return static_cast<Element const*>(data); };
      params.problems[i] = {elements(from.lhs),
                            elements(from.rhs),
                            static_cast<Element*>(from.out),
                            elements(from.alpha),
                            elements(from.beta),
                            from.m,
                            from.n,
                            from.k};
      runs.push_back({i, from.m, from.n, 0, ceil_div(from.k, Config::kTileK)});
    }
    params.units = Schedule::arrange(runs);
    std::copy(runs.begin(), runs.end(), params.runs);
  }
};

}  // namespace jgg::fp64
