// One triangle of A A^T, A B^T + B A^T or A B^T: coordinates of its tiles in memory.
#pragma once

#include <algorithm>
#include <cute/arch/copy_sm90_desc.hpp>

#include "multiprocessors.h"
#include "parts/terms.h"
#include "rank_k/epilogue.h"
#include "rank_k/rank_k.h"
#include "scheduler/triangular.h"
#include "scheduler/triangular_fine.h"
#include "sm90/config.h"
#include "sm90/fixup/exchange.h"
#include "sm90/tma/views.h"

namespace jgg::sm90 {

// alpha, beta or the diagonal of a stack: a float for each matrix, or one for all.
struct MatrixScales {
  float const* values;
  int stride;

  __device__ float const& at(int matrix) const { return values[matrix * stride]; }
};

// Both sides of the product are rows of the same operands, so they have the same major.
// `kNarrowSteps` are the steps of a narrow tile that its mainloop takes from one stage.
template <class Config_, int kNarrowSteps = 2>
struct RankK {
  using Config = Config_;
  using Output = typename Config::Output;
  using Shared = ExchangingStorage<Config>;
  using Epilogue = TriangularEpilogue<RankK>;
  static constexpr bool kFine = Config::kTileM == Config::kTileN;
  // Whether a narrow tile may come in halves. Other mainloops do not know where they begin.
  static constexpr bool kHalvesNarrow = !kFine && kNarrowSteps == 2;
  static constexpr int kEarlyReleaseSteps = kNoSteps;
  static constexpr bool kKeepsStep = false;
  static constexpr bool kAdds = false;  // but to C, in its epilogue
  static constexpr bool kHasNarrowTiles = true;
  static constexpr bool kSpreadsStores = true;
  static_assert(Config::kLhsMajor == Config::kRhsMajor);

  // Stacks to a launch. Their descriptors are parameters of the kernel: 60 would fit, but a launch
  // takes 2 us longer then, where 24 take under 1 us.
  static constexpr int kMaxStacks = kFine ? 4 : 24;
  // One box of an operand: all rows of an lhs tile, and half of those of an rhs tile that is wider.
  static constexpr int kBoxRows = Config::kTileM;

  struct Descriptors {
    CUtensorMap a;
    CUtensorMap b;
    CUtensorMap out;
    Output* out_data;
    Output const* c_data;
    MatrixScales alpha;
    MatrixScales beta;
    MatrixScales diagonal;
  };

  // The parameters that are read first lie together, because a block of a short kernel waits for
  // each line of them.
  struct Params {
    int count;
    bool two_products;  // A B^T and B A^T
    bool one_product;   // A B^T alone
    Uplo uplo;
    OtherTriangle other;
    bool adds_c;
    bool adds_diagonal;
    TriangularStack stacks[kMaxStacks];
    bool in_slabs[kMaxStacks];
    int first_matrix[kMaxStacks];  // matrices of the stacks before this one
    Descriptors descriptors[kMaxStacks];
  };

  using Triangle = TriangularScheduleOf<Config::kTileM, Config::kTileN, Config::kCluster>;

  struct Schedule {
    Triangle triangle;

    __device__ bool tile(int unit, int rank, WorkTile& work) const {
      WorkTile found;
      bool const more = triangle.tile(unit, rank, found);
      if (DeviceWarp::leads()) work = found;
      return more;
    }

    __device__ bool run(int unit, Run& run) const { return triangle.run(unit, run); }
  };

  template <class Warp>
  using Turns = typename Triangle::template Turns<Warp, kMaxClusters<Config>>;

  template <class Warp>
  __device__ static Schedule schedule(Params const& params) {
    return {Triangle(params.stacks, params.count, params.uplo)};
  }

  // By one thread. The first loads would wait for their descriptors.
  __device__ static void prefetch_descriptors(Params const& params) {
    for (CUtensorMap const* descriptor : {&params.descriptors[0].a, &params.descriptors[0].b}) {
      cute::prefetch_tma_descriptor(descriptor);
    }
  }

  // The number of the matrix of a tile among those of all stacks.
  __device__ static int matrix(Params const& params, WorkTile const& work) {
    return params.first_matrix[work.group] + work.batch;
  }

  // A box reads zeros where its rows leave the operand, so tiles are always loaded in full.
  __device__ static int rows_left(Params const&, WorkTile const&) { return Config::kTileM; }

  __device__ static int columns_needed(Params const& params, WorkTile const& work) {
    return is_narrow(params, work) ? Config::kTileM : work.extent - work.n;
  }

  __device__ static bool is_narrow(Params const& params, WorkTile const& work) {
    return Triangle::is_narrow(work, params.uplo);
  }

  // Whether both sides of a tile are the same rows, of which a stage then holds two steps.
  __device__ static bool shares_rows(Params const& params, WorkTile const& work) {
    return is_narrow(params, work) && !params.one_product;
  }

  // Whether a step has rows at `m` of A and rows at `n` of B, and the next one the others. A fine
  // unit on the diagonal multiplies rows of either side by each other: of A B^T alone too it needs
  // both operands of both sides.
  __device__ static bool pairs_steps(Params const& params, WorkTile const& work) {
    return params.two_products || (kFine && params.one_product && work.share == Share::kBoth);
  }

  // The steps of a rank-2k update alternate between A B^T and B A^T. Nothing but these loads knows:
  // to the consumers it is one product of twice the depth. One product after the other would read
  // both operands twice from memory; this way the second step of each pair finds in L2 what tiles
  // across the diagonal, or the first step, have just read.
  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    // All rows come in one box.
    if (box > 0) return;
    Step const step(params, work, k);
    load(params, work, step.swapped, step.k, work.m, loader, to, box, shared);
  }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Step const step(params, work, k);
    load(params, work, !step.swapped, step.k, work.n + column, loader, to, box, shared);
  }

  // Encodes `count` stacks from `stacks` on. Returns how many units of work they are.
  static cudaError_t make_params(RankKArguments const& arguments, RankKStack const* stacks,
                                 int count, Params& params, int& units) {
    params.count = count;
    params.one_product = stacks->b != nullptr && arguments.one_product;
    params.two_products = stacks->b != nullptr && !arguments.one_product;
    params.uplo = arguments.uplo;
    params.other = arguments.other;
    params.adds_c = arguments.adds_c;
    params.adds_diagonal = arguments.adds_diagonal;
    units = 0;
    int matrices = 0;
    for (int i = 0; i < count; ++i) {
      RankKStack const& stack = stacks[i];
      int const products = (params.two_products ? 2 : 1) * parts::terms_of(arguments.accuracy);
      int const k_tiles = ceil_div(stack.k, Config::kTileK) * products;
      TriangularStack& scheduled = params.stacks[i];
      // A B^T alone has other rows on each side of a narrow tile too.
      int const narrow_steps = params.one_product ? 1 : kNarrowSteps;
      scheduled = {stack.matrices, stack.n, k_tiles, ceil_div(k_tiles, narrow_steps), units};
      // Units of other stacks would fill up the last round.
      if (kHalvesNarrow && narrow_steps == 2 && arguments.may_halve &&
          arguments.stacks.size() == 1) {
        int clusters;
        cudaError_t const status = count_clusters(clusters);
        if (status != cudaSuccess) return status;
        scheduled.halves_narrow = Triangle::gains_by_halves(scheduled, arguments.uplo, clusters);
      }
      params.first_matrix[i] = matrices;
      matrices += stack.matrices;
      params.in_slabs[i] = kRowsContiguous && stack.n % Config::kSlab == 0;
      units += Triangle::units(scheduled, arguments.uplo);

      Descriptors& to = params.descriptors[i];
      to.out_data = static_cast<Output*>(stack.out);
      to.c_data = static_cast<Output const*>(stack.c);
      to.alpha = {stack.alpha, stack.alpha_stride};
      to.beta = {stack.beta, stack.beta_stride};
      to.diagonal = {stack.diagonal, stack.diagonal_stride};
      for (auto [descriptor, data] :
           {std::pair{&to.a, stack.a}, std::pair{&to.b, stack.b ? stack.b : stack.a}}) {
        int const count_in_memory = stack.matrices * parts::parts_of(arguments.accuracy);
        cudaError_t const status = encode_operand(descriptor, data, count_in_memory, stack);
        if (status != cudaSuccess) return status;
      }
      cudaError_t const status = encode_plain(&to.out, view<Output>(stack.out), stack.matrices,
                                              stack.n, stack.n, kRowsPerConsumer);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }

 private:
  // Counts the clusters that run at the same time on the current device.
  static cudaError_t count_clusters(int& clusters) {
    int multiprocessors = 0;
    cudaError_t const status = count_multiprocessors(multiprocessors);
    clusters = std::max(multiprocessors / Config::kCluster, 1);
    return status;
  }

  static constexpr bool kRowsContiguous = Config::kLhsMajor == Major::kMN;

  // The operands that K tile k / kTileK of the mainloop multiplies.
  struct Step {
    __device__ Step(Params const& params, WorkTile const& work, int k)
        : swapped(pairs_steps(params, work) && k % (2 * Config::kTileK) != 0),
          k(pairs_steps(params, work) ? k / (2 * Config::kTileK) * Config::kTileK : k) {}

    bool swapped;  // B A^T
    int k;
  };

  template <class Loader>
  __device__ static void load(Params const& params, WorkTile const& work, bool from_b, int k,
                              int row, Loader const& loader, uint8_t* to, int box, bool shared) {
    Descriptors const& descriptors = params.descriptors[work.group];
    CUtensorMap const& descriptor = from_b ? descriptors.b : descriptors.a;
    if constexpr (!kRowsContiguous) {
      loader.load(descriptor, to, box, shared, k, row, work.batch);
    } else if (params.in_slabs[work.group]) {
      loader.load(descriptor, to, box, shared, 0, k, row / Config::kSlab, work.batch);
    } else {
#pragma unroll
      for (int slab = 0; slab < kBoxRows; slab += Config::kSlab) {
        loader.load(descriptor, to + slab / Config::kSlab * Config::kSlabBytes, box, shared,
                    row + slab, k, work.batch);
      }
    }
  }

  static cudaError_t encode_operand(CUtensorMap* descriptor, void const* data, int matrices,
                                    RankKStack const& stack) {
    TensorView operand = view<typename Config::Element>(data);
    if constexpr (!kRowsContiguous) {
      // The steps of a fine tile follow so closely that each had better fetch its own.
      if (kFine) operand.fetch = kFetchBox;
      return encode_plain(descriptor, operand, matrices, stack.n, stack.k, kBoxRows);
    } else if (stack.n % Config::kSlab == 0) {
      return encode_slabs(descriptor, operand, matrices, stack.k, stack.n, Config::kTileK,
                          kBoxRows / Config::kSlab);
    } else {
      return encode_plain(descriptor, operand, matrices, stack.k, stack.n, Config::kTileK);
    }
  }
};

}  // namespace jgg::sm90
