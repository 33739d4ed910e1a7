// gate and up of an expert MLP as one product: coordinates of its tiles in memory.
#pragma once

#include "mlp/gated_epilogue.h"
#include "mlp/gated_ragged_dot.h"
#include "ragged/noncontracting.h"

namespace jgg::mlp {

// A tile of 256 columns is 128 of the gate's weights and the same 128 of the up projection's, each
// one box of an operand tile. So the product has twice the columns of a result, rounded up to whole
// tiles.
template <class Config_>
struct GatedProduct {
  using Config = Config_;
  using Rows = sm90::RaggedNoncontracting<Config>;
  using Epilogue = GatedEpilogue<GatedProduct>;
  static constexpr bool kMasksRows = false;
  static constexpr bool kAdds = false;
  static constexpr bool kSpreadsStores = true;
  static constexpr int kEarlyReleaseSteps = Rows::kEarlyReleaseSteps;
  static constexpr bool kKeepsStep = Rows::kKeepsStep;
  static constexpr int kColumns = Config::kTileN / 2;
  static_assert(!Rows::kHasHeads && kColumns == Config::kRhsBoxColumns);

  struct Params {
    typename Rows::Params gate;  // with x and the gate's weights; n is that of the product
    typename Rows::Params up;
    CUtensorMap hidden;
    float const* weights;
    GatedFunction activation;
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

  template <class Loader>
  __device__ static void load_rhs(Params const& params, WorkTile const& work, int k, int column,
                                  Loader const& loader, uint8_t* to, int box, bool shared) {
    auto const& weights = column == 0 ? params.gate : params.up;
    // Rows::load_rhs adds it to the tile's first column.
    Rows::load_rhs(weights, work, k, work.n / 2 - work.n, loader, to, box, shared);
  }

  __device__ static sm90::StoreCoordinates store_at(Params const& params, WorkTile const& work,
                                                    int row) {
    auto at = Rows::store_at(params.gate, work, row);
    at.column = work.n / 2;
    return at;
  }

  static cudaError_t make_params(GatedArguments const& a, Params& params) {
    sm90::RaggedDotArguments product{};
    product.lhs = a.x;
    product.groups = a.groups;
    product.type = product.out_type = a.type;
    product.k = a.k;
    product.n = a.n;

    using Output = typename Config::Output;
    params.keeps_gate = a.gate != nullptr;
    product.rhs = a.gate_weights;
    product.out = params.keeps_gate ? a.gate : a.hidden;
    cudaError_t status = Rows::make_params(product, params.gate);
    if (status != cudaSuccess) return status;
    product.rhs = a.up_weights;
    product.out = params.keeps_gate ? a.up : a.hidden;
    status = Rows::make_params(product, params.up);
    if (status != cudaSuccess) return status;
    params.gate.n = scheduled_columns(a);
    params.weights = a.weights;
    params.activation = GatedFunction(a.activation);
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
