// alpha A B + beta C for lists of stacks of matrices: coordinates of their tiles in memory.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "grouped/epilogue.h"
#include "grouped/grouped_gemm.h"
#include "parts/terms.h"
#include "scheduler/problem_list.h"
#include "scheduler/turns.h"
#include "sm90/config.h"
#include "sm90/tma/views.h"

namespace jgg::sm90 {

// A list has at most kCapacity problems.
template <class Config_, int kCapacity>
struct GroupedGemm {
  using Config = Config_;
  using Element = typename Config::Element;
  using Output = typename Config::Output;
  using Shared = SharedStorage<Config>;
  using Epilogue = ListEpilogue<GroupedGemm>;
  static constexpr bool kSpreadsStores = false;
  static constexpr int kEarlyReleaseSteps = kAllSteps;
  static constexpr bool kKeepsStep = false;
  static constexpr bool kAdds = false;  // because the epilogue adds C
  static constexpr bool kHasNarrowTiles = Config::kTileN == 256;

  struct Descriptors {
    CUtensorMap lhs;
    CUtensorMap rhs;
    CUtensorMap out;
  };

  // Parameters hold all that a launch needs, so that nothing has to be copied to the device first.
  struct Params {
    Descriptors descriptors[kCapacity];
    ListedProblem problems[kCapacity];
    Output const* outs[kCapacity];
    float const* alphas;
    float const* betas;
    ScheduledUnit const* schedule;
    float alpha;
    float beta;
    int scheduled_units;
    int count;
    int matrices;
    bool adds_c;
  };

  template <class Warp>
  using Schedule = ListSchedule<Warp, Config::kTileM, Config::kTileN, Config::kCluster>;

  // Nearly every tile needs other descriptors than the previous tile. A tile's descriptors are
  // prefetched when the tile is found, so that its first loads need not wait for them.
  template <class Warp>
  class PrefetchingSchedule {
   public:
    __device__ PrefetchingSchedule(Params const& params)
        : params_(params),
          schedule_(list(params), params.schedule, params.scheduled_units,
                    gridDim.x / Config::kCluster) {}

    __device__ bool tile(int unit, int rank, WorkTile& work) {
      if (!schedule_.tile(unit, rank, work)) return false;
      if (Warp::leads()) {
        Descriptors const& descriptors = params_.descriptors[work.group];
        cute::prefetch_tma_descriptor(&descriptors.lhs);
        cute::prefetch_tma_descriptor(&descriptors.rhs);
        cute::prefetch_tma_descriptor(&descriptors.out);
      }
      return true;
    }

   private:
    Params const& params_;
    Schedule<Warp> schedule_;
  };

  template <class Warp>
  using Turns = RoundRobin;

  template <class Warp>
  __device__ static PrefetchingSchedule<Warp> schedule(Params const& params) {
    return PrefetchingSchedule<Warp>(params);
  }

  // Returns the number of a tile's matrix among the matrices of all problems.
  __device__ static int matrix(Params const& params, WorkTile const& work) {
    return params.problems[work.group].first_matrix + work.batch;
  }

  __device__ static int rows_left(Params const&, WorkTile const& work) {
    return work.extent - work.m;
  }

  __device__ static int columns_needed(Params const& params, WorkTile const& work) {
    return params.problems[work.group].n - work.n;
  }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    CUtensorMap const& lhs = params.descriptors[work.group].lhs;
    if constexpr (Config::kLhsMajor == Major::kK) {
      loader.load(lhs, to, box, shared, k, work.m + row, work.batch);
    } else {
      loader.load(lhs, to, box, shared, work.m + row, k, work.batch);
    }
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    CUtensorMap const& rhs = params.descriptors[work.group].rhs;
    int const n = work.n + column;
    if constexpr (Config::kRhsMajor == Major::kK) {
      loader.load(rhs, to, box, shared, k, n, work.batch);
    } else if (in_slabs(params.problems[work.group].n)) {
      loader.load(rhs, to, box, shared, 0, k, n / Config::kSlab, work.batch);
    } else {
#pragma unroll
      for (int slab = 0; slab < Config::kRhsBoxColumns; slab += Config::kSlab) {
        loader.load(rhs, to + slab / Config::kSlab * Config::kSlabBytes, box, shared, n + slab, k,
                    work.batch);
      }
    }
  }

  static cudaError_t make_params(GroupedGemmArguments const& arguments, Params& params) {
    params.alphas = arguments.alphas;
    params.betas = arguments.betas;
    params.alpha = arguments.alpha;
    params.beta = arguments.beta;
    params.adds_c = arguments.adds_c;
    params.schedule = arguments.schedule;
    params.scheduled_units = arguments.rounds * arguments.clusters;
    params.count = static_cast<int>(arguments.problems.size());
    params.matrices = 0;
    for (int i = 0; i < params.count; ++i) {
      GroupedGemmProblem const& problem = arguments.problems[i];
      int const k_tiles = ceil_div(problem.k, Config::kTileK) * parts::terms_of(arguments.accuracy);
      params.problems[i] = {problem.m, problem.n, k_tiles, params.matrices};
      params.outs[i] = static_cast<Output const*>(problem.out);
      params.matrices += problem.matrices;
      cudaError_t const status =
          encode(problem, parts::parts_of(arguments.accuracy), params.descriptors[i]);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }

  // Returns how many clusters have something to do.
  static int64_t max_clusters(GroupedGemmArguments const& arguments, Params const& params) {
    if (arguments.schedule) return arguments.clusters;
    int64_t units = 0;
    for (int i = 0; i < params.count; ++i) {
      units += Schedule<SimulatedWarp>::units(list(params), i);
    }
    return units;
  }

 private:
  JGG_HOST_DEVICE static ProblemList list(Params const& params) {
    return {params.problems, params.count, params.matrices};
  }

  JGG_HOST_DEVICE static bool in_slabs(int columns) { return columns % Config::kSlab == 0; }

  // Each matrix of an operand is `parts` matrices in memory.
  static cudaError_t encode(GroupedGemmProblem const& problem, int parts, Descriptors& to) {
    TensorView const lhs = view<Element>(problem.lhs), rhs = view<Element>(problem.rhs);
    int const count = problem.matrices * parts, m = problem.m, n = problem.n, k = problem.k;
    cudaError_t status = Config::kLhsMajor == Major::kK
                             ? encode_plain(&to.lhs, lhs, count, m, k, kRowsPerConsumer)
                             : encode_plain(&to.lhs, lhs, count, k, m, Config::kTileK);
    if (status != cudaSuccess) return status;
    if constexpr (Config::kRhsMajor == Major::kK) {
      status = encode_plain(&to.rhs, rhs, count, n, k, Config::kRhsBoxColumns);
    } else if (in_slabs(n)) {
      status = encode_slabs(&to.rhs, rhs, count, k, n, Config::kTileK,
                            Config::kRhsBoxColumns / Config::kSlab);
    } else {
      status = encode_plain(&to.rhs, rhs, count, k, n, Config::kTileK);
    }
    if (status != cudaSuccess) return status;
    return encode_plain(&to.out, view<Output>(problem.out), problem.matrices, m, n,
                        kRowsPerConsumer);
  }
};

}  // namespace jgg::sm90
