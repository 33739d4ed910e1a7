// Two warps quantise rows while a thread loads matrices, so a layer needs no kernel that only
// quantises. The matrices are on the M side of WGMMA, as in swapped kernels. Rows are quantised
// again for each 128 columns, so only layers whose groups have one or two rows on average have this
// kernel. A tile therefore has 8 rows, the least that WGMMA takes, which leaves room for stages.
#include <algorithm>

#include "few_rows/sizes.h"
#include "mlp/hidden_octets.h"
#include "mlp/quantizing_product.h"
#include "ragged/group_rows.h"
#include "scaled/views.h"
#include "sm90/dependent_launch.h"
#include "sm90/launch.h"
#include "sm90/mainloop/swapped_scaled.h"
#include "sm90/tile_roles.h"

namespace jgg::mlp {
namespace {

using quantize::kOctet;
using sm90::kScaleThreads;

constexpr ElementType kFp8 = ElementType::kE4m3;
constexpr int kLoadingWarps = 1 + kScaleThreads / kWarpSize;

struct Config
    : sm90::SwappedScaledConfig<cutlass::float_e4m3_t, cutlass::float_e4m3_t, /*kTileM=*/8,
                                /*kTileN=*/128, /*kBlocks=*/2, sizeof(few_rows::Groups)> {};

struct Storage : sm90::SwappedScaledStorage<Config> {
  few_rows::Groups sorted;
};

// The swapped mainloop multiplies this problem. Unlike a SwappedScaledProblem, it has no functions
// that load rows and scales, because warps bring both.
struct QuantizingProduct : sm90::GroupRows<Config> {
  using Config = mlp::Config;
  static constexpr bool kBringsRows = true;

  struct Params {
    CUtensorMap rhs;
    CUtensorMap out;
    GroupSizes groups;
    int const* pair_groups;  // [rows], the group of each pair
    BlockScales rhs_scales;
    __nv_bfloat16 const* rows;  // tokens or, with `row_weights`, projections of sorted pairs
    float const* row_weights;
    GatedFunction function;
    int choices;
    bool power_of_two;
    int* places;
    int n;
    int k;
    int store_shift;

    __device__ int steps() const { return ceil_div(k, kScaleBlock); }
  };

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int block,
                                  Loader const& loader, uint8_t* to, bool shared) {
    loader.load(params.rhs, to, block, shared, block * Config::kTileK, work.n, work.group);
  }

  __device__ static float channel_scale(Params const&, WorkTile const&, int) { return 1.0f; }

  static int64_t max_units(QuantizingArguments const& a) {
    int64_t const row_tiles = ceil_div(a.groups.rows, Config::kTileM) + int64_t(a.groups.groups);
    return std::min<int64_t>(row_tiles, a.groups.rows) * ceil_div(a.n, Config::kTileN);
  }

  static cudaError_t make_params(QuantizingArguments const& a, Params& params) {
    // An earlier kernel may still read the places.
    if (a.places != nullptr && a.follows) return cudaErrorInvalidValue;
    params.groups = a.groups;
    params.pair_groups = a.pair_groups;
    params.rhs_scales = a.scales;
    params.rows = static_cast<__nv_bfloat16 const*>(a.rows);
    params.row_weights = a.row_weights;
    params.function = GatedFunction(a.activation);
    params.choices = a.choices;
    params.power_of_two = a.power_of_two;
    params.places = a.places;
    params.n = a.n;
    params.k = a.k;
    params.store_shift = a.groups.rows;
    cudaError_t const status = sm90::encode_plain(&params.rhs, sm90::view_bytes(a.matrices),
                                                  a.groups.local_groups, a.n, a.k, Config::kTileN);
    if (status != cudaSuccess) return status;
    return sm90::encode_ragged_store(&params.out, sm90::view_out(a.out, ElementType::kBf16), a.n,
                                     Config::kOutBoxRows, params.store_shift);
  }
};

using Params = QuantizingProduct::Params;
using Stage = sm90::StageIterator<Config::kStages>;

// A team is eight threads, which quantise the 128 elements of a row in a step. A thread has two
// octets, which are 64 elements apart.
constexpr int kLanes = 8, kTeams = kScaleThreads / kLanes, kOctets = 2;
static_assert(kOctets * kOctet * kLanes == Config::kTileK);

// The data that a thread reads for a row in a step.
template <bool kIsHidden>
struct Source {
  using Octet = quantize::Octet<__nv_bfloat16>;
  Octet first[kOctets];  // of the token, or of gate
  Octet up[kIsHidden ? kOctets : 1];
  float weight;        // of the pair, for hidden
  float column_scale;  // the scale of the matrix for the tile's columns in this step
};

// Brings the rows of a tile into its stages, with their scales times those of the tile's columns.
// Item i of a tile is row i % rows of step i / rows. Team t quantises items t, t + 8, t + 16 and so
// on, so that all teams are busy even if a tile has one row. A round quantises one item in each
// team, and then stores the items in the stages of their steps. The two warps have equal loops: in
// each step both wait for the stage and arrive once, even if one of them has no row of the step. If
// the items of a step are spread over two rounds, the second round waits again at the same phase,
// which has passed.
template <bool kIsHidden>
__device__ __forceinline__ void bring_rows(Params const& params, WorkTile const& work,
                                           Storage& shared, Stage& stage) {
  if (work.k_tiles == 0) return;  // No local group owns the rows, so the tile has no stage.
  unsigned const rows = sm90::rows_of<Config>(work), items = rows * work.k_tiles;
  int const team = threadIdx.x % kScaleThreads / kLanes, lane = threadIdx.x % kLanes;
  int const pitch = params.steps() * kScaleBlock;
  // Lane i of each warp finds row i. Offsets count octets.
  int const place = work.begin + work.m + min(threadIdx.x % kWarpSize, rows - 1);
  int const pair = shared.sorted.order[place];
  unsigned const offset_of_row = kIsHidden ? place * unsigned(2 * pitch / kOctet)
                                           : pair / params.choices * unsigned(params.k / kOctet);
  float const weight_of_row = kIsHidden ? __ldg(params.row_weights + pair) : 0.0f;
  float const* const column_scales =
      params.rhs_scales.data + work.group * params.rhs_scales.group_stride +
      int64_t(work.n / kScaleBlock) * params.rhs_scales.column_block_stride;
  unsigned const steps_on = kTeams / rows, rows_on = kTeams - steps_on * rows;
  unsigned read_step = team / rows, read_row = team - read_step * rows;
  // Reads the next item of the team. All threads of a warp call this.
  auto const read = [&] {
    Source<kIsHidden> source{};
    unsigned const offset = __shfl_sync(~0u, offset_of_row, read_row);
    if constexpr (kIsHidden) source.weight = __shfl_sync(~0u, weight_of_row, read_row);
    int const step = read_step, column = step * kScaleBlock + lane * kOctet;
    auto const* const from = params.rows + uint64_t(offset) * kOctet + column;
    if (step < work.k_tiles) {
#pragma unroll
      for (int j = 0; j < kOctets; ++j) {
        int const ahead = j * kLanes * kOctet;
        // Projections are padded to whole blocks.
        int const count = kIsHidden ? kOctet : params.k - column - ahead;
        source.first[j] = Source<kIsHidden>::Octet::template load<true>(from + ahead, count);
        if constexpr (kIsHidden) {
          source.up[j] = Source<kIsHidden>::Octet::template load<true>(from + pitch + ahead, count);
        }
      }
      source.column_scale = __ldg(column_scales + step * params.rhs_scales.block_stride);
    }
    read_step += steps_on, read_row += rows_on;
    if (read_row >= rows) read_row -= rows, ++read_step;
    return source;
  };
  Source<kIsHidden> next = read();
  unsigned begin = 0;  // the first item of the step of `stage`
#pragma unroll 1
  for (unsigned first = 0; first < items; first += kTeams) {
    unsigned const item = first + team, end = min(first + kTeams, items);
    Source<kIsHidden> source = next;
    next = read();  // ahead, because a load takes as long as quantising an item
    if constexpr (kIsHidden) activate(params.function, source.first, source.up, source.weight);
    auto const scale = quantize::scale_of_octets<kFp8, kLanes>(source.first, params.power_of_two);
    uint2 values[kOctets];
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      values[j] =
          quantize::convert_eight<kFp8>([&](int e) { return source.first[j][e] * scale.inverse; });
    }
    while (begin < end) {
      shared.empty[stage.stage].wait(stage.phase ^ 1);
      if (unsigned const row = item - begin; row < rows) {
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
          int const unit = lane / 2 + j * kLanes / 2;
          uint8_t* const to = sm90::swizzled(shared.lhs[stage.stage], row, unit);
          reinterpret_cast<uint2*>(to)[lane % 2] = values[j];
        }
        if (lane == 0) shared.lhs_scales[stage.stage][row] = scale.scale * source.column_scale;
      }
      if (begin + rows > end) break;  // the next round has more items of this step
      sm90::fence_async_proxy();      // because WGMMA reads the rows
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) shared.scales_full[stage.stage].arrive();
      begin += rows;
      ++stage;
    }
  }
}

struct Roles : sm90::TileRoles<QuantizingProduct> {
  using Shared = Storage;
  using Mainloop = sm90::SwappedScaledMainloop<QuantizingProduct>;
  static constexpr sm90::Registers kRegisters{};  // as launched
  static constexpr int kBlocks = 2;
  static_assert(sizeof(Shared) <= Config::kSharedMemory);

  __device__ static void initialize(Params const& params, Shared& shared) {
    sm90::let_next_begin();
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(&params.rhs);
      sm90::set_arrivals(shared.full, 1);
      sm90::set_arrivals(shared.scales_full, kScaleThreads / kWarpSize);
      sm90::set_arrivals(shared.empty, Mainloop::kEmptyArrivals);
      sm90::initialize_work(shared, kLoadingWarps);
      sm90::fence_barriers();
    }
    // The mainloop multiplies by ones, because scales of rows already have the factor of columns.
    if (threadIdx.x < Config::kStages) shared.rhs_scales[threadIdx.x][0] = 1.0f;
  }

  __device__ static void load(Params const& params, Shared& shared, int rank) {
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if (threadIdx.x % kWarpSize == 0) Mainloop::load(params, work, shared, stage, rank);
    });
  }

  __device__ static void schedule(Params const& params, Shared& shared, int) {
    GroupSizes const groups =
        few_rows::read_groups(params.pair_groups, params.groups, shared.sorted);
    QuantizingProduct::Schedule<DeviceWarp> schedule(groups, params.n, params.k);
    sm90::fill_ring<Config>(schedule, RoundRobin(blockIdx.x, gridDim.x), shared);
  }

  // Only these warps wait for the previous kernel, because only rows depend on it. They wait even
  // if the block has no tile: the next kernel waits for this one, and then also sees what the
  // previous kernel wrote. Tiles without steps are stored without this wait. No earlier kernel of
  // the layer reads or writes `out`.
  __device__ static void bring(Params const& params, Shared& shared, int, int warp) {
    if (warp == 1) {
      few_rows::sort_pairs(params.pair_groups, params.groups, shared.sorted);
      // Only a product that does not start early has `places`.
      if (params.places != nullptr && blockIdx.x == 0) {
        __syncwarp();
        for (int i = threadIdx.x % kWarpSize; i < params.groups.rows; i += kWarpSize) {
          params.places[shared.sorted.order[i]] = i;
        }
      }
    }
    sm90::await_previous();
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      if (params.row_weights != nullptr) {
        bring_rows<true>(params, work, shared, stage);
      } else {
        bring_rows<false>(params, work, shared, stage);
      }
    });
  }

  __device__ static void consume(Params const& params, Shared& shared, int consumer) {
    sm90::SwappedEpilogue<Config> const epilogue(shared, params.out, ElementType::kBf16, consumer);
    sm90::for_each_tile<Config>(shared, [&](WorkTile const& work, auto& stage) {
      Mainloop::compute<Config::kTileM>(params, work, shared, stage, consumer, epilogue);
    });
    epilogue.wait();
  }
};

}  // namespace

cudaError_t multiply_quantizing(QuantizingArguments const& arguments, cudaStream_t stream) {
  using Problem = QuantizingProduct;
  Params params;
  cudaError_t const status = Problem::make_params(arguments, params);
  if (status != cudaSuccess) return status;
  return sm90::launch_persistent<Roles>(params, Problem::max_units(arguments), arguments.max_sms,
                                        stream, arguments.follows);
}

}  // namespace jgg::mlp
