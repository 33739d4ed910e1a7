// Gate and up of an expert MLP as one product: coordinates of its tiles in memory.
#pragma once

#include <type_traits>

#include "dispatch.h"
#include "mlp/gated_epilogue.h"
#include "mlp/gated_ragged_dot.h"
#include "ragged/noncontracting.h"

namespace jgg::mlp {

// A tile of 256 columns has 128 columns of the gate's weights and the same 128 columns of the up
// projection's weights. Each half is one box of an operand tile. So the product has twice the
// columns of a result, rounded up to whole tiles.
//
// Without up, a tile has 256 columns of the gate, and hidden is their weighted activation. A
// general product has biases, which may be zero, and any activation.
template <class Config_, bool kHasUp_ = true, bool kIsGeneral_ = false, bool kGathersLhs_ = false,
          bool kGathersOwnRows_ = false>
struct GatedProduct {
  using Config = Config_;
  static constexpr bool kHasUp = kHasUp_;
  static constexpr bool kIsGeneral = kIsGeneral_;
  static constexpr bool kGathersLhs = kGathersLhs_;
  static constexpr bool kGathersOwnRows = kGathersOwnRows_;
  using Rows = sm90::RaggedNoncontracting<Config, kGathersLhs, kGathersOwnRows>;
  using Epilogue = GatedEpilogue<GatedProduct>;
  static constexpr bool kAdds = false;
  static constexpr bool kSpreadsStores = true;
  static constexpr int kEarlyReleaseSteps = Rows::kEarlyReleaseSteps;
  static constexpr bool kKeepsStep = Rows::kKeepsStep;
  static constexpr int kColumns = Config::kTileN / (kHasUp ? 2 : 1);
  static_assert(!kHasUp || kColumns == Config::kRhsBoxColumns);

  struct Params {
    typename Rows::Params gate;  // with x and the gate's weights; n is that of the product
    typename Rows::Params up;
    CUtensorMap hidden;
    Bias gate_bias;
    Bias up_bias;
    int up_column;  // the first column of `up`
    int columns;    // of the result
    float const* weights;
    std::conditional_t<kIsGeneral, GeneralFunction, GatedFunction> activation;
    bool keeps_gate;
    bool keeps_step;
  };

  template <class Warp>
  using Schedule = typename Rows::template Schedule<Warp>;
  template <class Warp>
  using Turns = typename Rows::template Turns<Warp>;

  template <class Warp>
  __device__ static Schedule<Warp> schedule(Params const& params) {
    return Rows::template schedule<Warp>(params.gate);
  }

  __device__ static int rows_left(Params const& params, WorkTile const& work) {
    return Rows::rows_left(params.gate, work);
  }
  __device__ static bool is_whole(Params const& params, WorkTile const& work) {
    return Rows::is_whole(params.gate, work);
  }
  __device__ static int columns_needed(Params const&, WorkTile const&) { return Config::kTileN; }

  template <class Loader>
  __device__ static void load_lhs(Params const& params, WorkTile const& work, int k, int row,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    Rows::load_lhs(params.gate, work, k, row, loader, to, box, shared);
  }

  __device__ static int gathered_index(Params const& params, WorkTile const& work, int row) {
    return Rows::gathered_index(params.gate, work, row);
  }
  __device__ static int gathered_row(Params const& params, int index) {
    return Rows::gathered_row(params.gate, index);
  }

  __device__ static CUtensorMap const& gathered(Params const& params) { return params.gate.lhs; }

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    if constexpr (!kHasUp) {
      Rows::load_rhs(params.gate, work, k, column, loader, to, box, shared);
    } else {
      auto const& weights = column == 0 ? params.gate : params.up;
      int const first = column == 0 ? 0 : params.up_column;
      // Rows::load_rhs adds this argument to the tile's first column.
      Rows::load_rhs(weights, work, k, first + work.n / 2 - work.n, loader, to, box, shared);
    }
  }

  __device__ static sm90::StoreCoordinates store_at(Params const& params, WorkTile const& work,
                                                    int row) {
    auto at = Rows::store_at(params.gate, work, row);
    at.column = column_of(work);
    return at;
  }

  // Returns a tile's first column in the result.
  __device__ static int column_of(WorkTile const& work) { return kHasUp ? work.n / 2 : work.n; }

  static cudaError_t make_params(GatedArguments const& a, Params& params) {
    RaggedDotArguments product{};
    product.lhs = a.x;
    if (kGathersLhs) product.rows = {a.rows, a.divisor, a.tokens};
    product.groups = a.groups;
    product.type = product.out_type = a.type;
    product.k = a.k;
    product.n = a.is_concatenated ? 2 * a.n : a.n;

    using Output = typename Config::Output;
    params.keeps_gate = a.gate != nullptr;
    auto const make = [&](typename Rows::Params& to, void const* weights, void* kept) {
      product.rhs = weights;
      product.out = params.keeps_gate ? kept : a.hidden;
      cudaError_t const status = Rows::make_params(product, to);
      if (status != cudaSuccess || !a.is_concatenated) return status;
      return sm90::encode_ragged_store(&to.out, sm90::view<Output>(product.out), a.n,
                                       kRowsPerConsumer, to.store_shift);
    };
    // up has to begin where a slab begins.
    if (a.is_concatenated && a.n % Config::kSlab != 0) return kNotCompiled;
    if ((a.rows != nullptr) != kGathersLhs || !a.has_activation) {
      return kNotCompiled;
    }
    cudaError_t status = make(params.gate, a.gate_weights, a.gate);
    if (status == cudaSuccess && kHasUp) {
      status = make(params.up, a.is_concatenated ? a.gate_weights : a.up_weights, a.up);
    }
    if (status != cudaSuccess) return status;
    params.gate.n = scheduled_columns(a);
    params.columns = a.n;
    params.gate_bias = a.gate_bias;
    params.up_bias = a.up_bias;
    params.up_column = a.is_concatenated ? a.n : 0;
    params.weights = a.weights;
    params.activation = decltype(params.activation)(a.activation);
    params.keeps_step = params.gate.keeps_step;
    return sm90::encode_ragged_store(&params.hidden, sm90::view<Output>(a.hidden), a.n,
                                     kRowsPerConsumer, params.gate.store_shift);
  }

  static int64_t max_units(GatedArguments const& a) {
    int64_t const row_tiles = ceil_div(a.groups.rows, Config::kTileM) + int64_t(a.groups.groups);
    return row_tiles * (scheduled_columns(a) / Config::kTileN);
  }

 private:
  static int scheduled_columns(GatedArguments const& a) {
    return ceil_div(a.n, kColumns) * Config::kTileN;
  }
};

}  // namespace jgg::mlp
