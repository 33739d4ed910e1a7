// The problem of one triangle of A A^T, A B^T + B A^T or A B^T: where its tiles and operands lie in
// memory.
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
// `kNarrowSteps` is the number of steps of a narrow tile that a stage holds.
template <class Config_, int kNarrowSteps = 2>
struct RankK {
  using Config = Config_;
  using Output = typename Config::Output;
  using Shared = ExchangingStorage<Config>;
  using Epilogue = TriangularEpilogue<RankK>;
  static constexpr bool kFine = Config::kTileM == Config::kTileN;
  // Whether the CTAs of a cluster may compute half of a narrow tile's steps each. Only
  // TriangularMainloop, which has two narrow steps in a stage, knows where a half begins.
  static constexpr bool kHalvesNarrow = !kFine && kNarrowSteps == 2;
  static constexpr int kEarlyReleaseSteps = kNoSteps;
  static constexpr bool kKeepsStep = false;
  static constexpr bool kAdds = false;  // because the epilogue adds C
  static constexpr bool kHasNarrowTiles = true;
  static constexpr bool kSpreadsStores = true;
  static_assert(Config::kLhsMajor == Config::kRhsMajor);

  // The most stacks of a launch. Their descriptors are parameters of the kernel. 60 stacks would
  // fit, but make a launch 2 us longer. 24 stacks make it less than 1 us longer.
  static constexpr int kMaxStacks = kFine ? 4 : 24;
  // Rows of a box. A tile of lhs is one box. A tile of rhs is two boxes, or one box if the tile is
  // fine.
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

  // The parameters that are read first lie together, because a thread block of a short kernel waits
  // for each cache line of them.
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

  // Prefetches the descriptors of the first loads, which would wait for them otherwise. One thread
  // calls it.
  __device__ static void prefetch_descriptors(Params const& params) {
    for (CUtensorMap const* descriptor : {&params.descriptors[0].a, &params.descriptors[0].b}) {
      cute::prefetch_tma_descriptor(descriptor);
    }
  }

  // Returns the number of a tile's matrix among the matrices of all stacks.
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

  // Returns whether lhs and rhs of a tile are the same rows. A stage then holds two steps of these
  // rows.
  __device__ static bool shares_rows(Params const& params, WorkTile const& work) {
    return is_narrow(params, work) && !params.one_product;
  }

  // Returns whether steps come in pairs. The first step of a pair has rows at `m` of A and rows at
  // `n` of B, and the second has rows at `m` of B and rows at `n` of A. A fine unit on the diagonal
  // also multiplies rows at `m` by rows at `m`, and rows at `n` by rows at `n`. Such a unit
  // therefore needs pairs even for A B^T alone.
  __device__ static bool pairs_steps(Params const& params, WorkTile const& work) {
    return params.two_products || (kFine && params.one_product && work.share == Share::kBoth);
  }

  // The steps of a rank-2k update alternate between A B^T and B A^T. For the consumers of full
  // tiles the update is one product of twice the depth. If one product came after the other, both
  // operands would be read from memory twice. With alternating steps, the second step of a pair
  // finds in L2 what its first step, or a tile across the diagonal, has just read.
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

  // Makes the parameters for `count` stacks from `stacks` on. Sets `units` to the number of their
  // units of work.
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
      // For A B^T alone, lhs and rhs of a narrow tile come from different operands.
      int const narrow_steps = params.one_product ? 1 : kNarrowSteps;
      scheduled = {stack.matrices, stack.n, k_tiles, ceil_div(k_tiles, narrow_steps), units};
      // Narrow tiles are halved only if there is a single stack, because units of other stacks
      // would fill up the last wave.
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
      // The steps of a fine tile follow each other so closely that it is faster if L2 fetches each
      // step's box by itself.
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
