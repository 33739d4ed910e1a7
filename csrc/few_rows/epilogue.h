// Turns the sums of one warp into results: biases, activation and the weights of rows.
//
// Gate and up are rounded to the type in which they would be stored, as if one kernel computed gate
// and up, and another kernel the activation. The activation and the weight are computed in float32
// from these rounded values, and hidden is rounded once.
#pragma once

#include "few_rows/multiply.h"
#include "few_rows/params.h"

namespace jgg::few_rows {

// The numbers that a lane adds to its sums or multiplies them by. All of them are read at once,
// because a lane that read them between stores would wait for each separately.
template <int kBlocks>
struct Terms {
  float bias[2][2];          // [run][i] is of the column that `Epilogue::column(run, i)` returns
  float weight[kBlocks][2];  // of the lane's rows
};

template <class Config>
class Epilogue {
  using Element = typename Config::Element;

 public:
  // The warp's columns begin at column `first` of the tile. Each lane has the columns of its
  // accumulators.
  __device__ Epilogue(Product const& params, WorkTile const& work, int first, int const* order)
      : params_(params),
        work_(work),
        order_(order),
        column_(first_column<Config>(params, work) + first + lane_column()) {}

  // Returns column i of the lane's two columns in a run.
  __device__ int column(int run, int i) const {
    return column_ + (has_up() ? 0 : run * Config::kNextRun) + 8 * i;
  }

  __device__ void read_biases(float (&biases)[2][2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      biases[i / 2][i % 2] = bias_of(has_up() && i / 2, column(i / 2, i % 2));
    }
  }

  template <int kBlocks>
  __device__ Terms<kBlocks> read() const {
    Terms<kBlocks> terms;
    read_biases(terms.bias);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      int const row = row_of(i / 2, i % 2);
      terms.weight[i / 2][i % 2] =
          row < rows() ? params_.template weight<Config::kSortsPairs>(first_row() + row, order_)
                       : 0.0f;
    }
    return terms;
  }

  // Stores a lane's sums. A loop stores the sums of eight rows with one copy of the code, because
  // code that runs only a few times costs more to fetch than to run.
  template <int kBlocks>
  __device__ void store(Sums<kBlocks> const& sums, Terms<kBlocks> const& terms) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll 1
      for (int i = 0; i < (has_up() ? 4 : 8); ++i) {
        int const odd = i % 2, high = i / 2 % 2, run = i / 4;
        int const row = row_of(block, odd);
        if (row >= rows()) continue;
        float const weight = odd ? terms.weight[block][1] : terms.weight[block][0];
        float const first = pick(sums[0][block], i % 4), second = pick(sums[1][block], i % 4);
        float const bias = high ? terms.bias[0][1] : terms.bias[0][0];
        float const second_bias = high ? terms.bias[1][1] : terms.bias[1][0];
        store_one(row, column(run, high), weight, run ? second : first, run ? second_bias : bias,
                  second, second_bias);
      }
    }
  }

 protected:
  __device__ bool has_up() const { return few_rows::has_up<Config>(params_); }
  __device__ int rows() const { return work_.extent - work_.m; }
  __device__ int first_row() const { return work_.begin + work_.m; }
  __device__ Product const& params() const { return params_; }

  // Returns the bias of a column of the result.
  __device__ float bias_of(bool is_up, int column) const {
    mlp::Bias const& biases = is_up ? params_.up_bias : params_.gate_bias;
    if (biases.data == nullptr || column >= params_.n) return 0.0f;
    int64_t const at = int64_t(work_.group) * params_.n + column;
    if (biases.is_float32) return static_cast<float const*>(biases.data)[at];
    return static_cast<float>(static_cast<Element const*>(biases.data)[at]);
  }

 private:
  // Returns values[i]. For the expression `values[i]` itself, the compiler would put the values
  // into local memory.
  __device__ static float pick(float const (&values)[4], int i) {
    return i < 2 ? (i == 0 ? values[0] : values[1]) : (i == 2 ? values[2] : values[3]);
  }

  __device__ static int row_of(int block, int odd) { return block * kMmaRows + lane_row() + odd; }

  __device__ void store_one(int row, int column, float weight, float gate, float gate_bias,
                            float up, float up_bias) const {
    if (column >= params_.n) return;
    int64_t const at =
        params_.template result_row<Config::kSortsPairs>(first_row() + row, order_) * params_.n +
        column;
    Element* const out = static_cast<Element*>(params_.out);
    if (!params_.has_activation) {
      out[at] = static_cast<Element>(gate + weight * gate_bias);
      return;
    }
    Element const g = static_cast<Element>(gate + gate_bias);
    if (params_.kept_gate) static_cast<Element*>(params_.kept_gate)[at] = g;
    Element const u = static_cast<Element>(up + up_bias);
    if (has_up() && params_.kept_up) static_cast<Element*>(params_.kept_up)[at] = u;
    mlp::Gated const a =
        mlp::gated(params_.activation, static_cast<float>(g), static_cast<float>(u));
    out[at] = static_cast<Element>((has_up() ? a.activation * a.up : a.activation) * weight);
  }

  Product const& params_;
  WorkTile const& work_;
  int const* order_;
  int column_;
};

// Stores zeros in a tile of unowned rows. Each of `threads` threads calls this with its number.
template <class Config>
__device__ void store_zeros(Product const& params, WorkTile const& work, int thread, int threads,
                            int const* order) {
  using Element = typename Config::Element;
  int const rows = min(work.extent - work.m, Config::kTileM);
  int const columns = tile_columns<Config>(params), first = first_column<Config>(params, work);
  for (int i = thread; i < rows * columns; i += threads) {
    int const row = i / columns, column = first + i % columns;
    if (column >= params.n) continue;
    int64_t const at =
        params.template result_row<Config::kSortsPairs>(work.begin + work.m + row, order) *
            params.n +
        column;
    for (void* const out : {params.out, params.kept_gate, params.kept_up}) {
      if (out) static_cast<Element*>(out)[at] = Element(0.0f);
    }
  }
}

}  // namespace jgg::few_rows
