// Turns rounded sums into results: activations, the weights of rows, and the values that gradients
// need.
#pragma once

#include <type_traits>

#include "packed/params.h"

namespace jgg::packed {

using mlp::Form;

// Calls `function` with the form of the launch, as a constant, so that the activations of several
// elements overlap.
template <class Config, class Function>
__device__ void with_form(Params const& params, Function const& function) {
  auto const call = [&]<Form kForm>() { function(std::integral_constant<Form, kForm>{}); };
  if constexpr (Config::kHasUp) {
    if (params.form == Form::kPlain) return call.template operator()<Form::kPlain>();
    if (params.form == Form::kGated) return call.template operator()<Form::kGated>();
  } else {
    if (params.form == Form::kNone) return call.template operator()<Form::kNone>();
  }
  call.template operator()<Config::kHasUp ? Form::kGeneral : Form::kUngated>();
}

// Return two rounded numbers in a word, and one of the two.
__device__ inline uint32_t rounded_pair(float first, float second) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
__device__ inline float of_pair(uint32_t word, int second) {
  return __uint_as_float(second ? word & 0xFFFF0000 : word << 16);
}

template <class Config>
class Results {
  static_assert(sizeof(typename Config::Element) == 2);

 public:
  static constexpr int kElements = 8;  // of a row, which a lane turns into results at once

  __device__ Results(Params const& params, WorkTile const& work) : params_(params), work_(work) {}

  __device__ int rows() const { return min(work_.extent - work_.m, Config::kTileM); }

  // Returns the weight of a row of the tile, and 0 if the tile does not have the row.
  __device__ float weight(int row) const {
    return row < rows() ? params_.template weight<false>(first_row() + row, nullptr) : 0.0f;
  }

  // Stores the results of a row from `column` of the result on. `sums` and `ups` are in shared
  // memory. `ups` are used if there is an up.
  template <Form kForm>
  __device__ void store(int row, int column, float weight, uint4 const& sums,
                        uint4 const& ups) const {
    if (row >= rows() || column >= params_.n) return;
    int64_t const at = (int64_t(first_row()) + row) * params_.n + column;
    int const left = params_.n - column;
    uint4 const gate = sums;
    if constexpr (kForm == Form::kNone) {
      write(params_.out, at, left, gate);
    } else {
      uint4 const up = Config::kHasUp ? ups : uint4{};
      if (params_.kept_gate) write(params_.kept_gate, at, left, gate);
      if constexpr (Config::kHasUp) {
        if (params_.kept_up) write(params_.kept_up, at, left, up);
      }
      write(params_.out, at, left,
            {activated<kForm>(gate.x, up.x, weight), activated<kForm>(gate.y, up.y, weight),
             activated<kForm>(gate.z, up.z, weight), activated<kForm>(gate.w, up.w, weight)});
    }
  }

 private:
  __device__ int first_row() const { return work_.begin + work_.m; }

  template <Form kForm>
  __device__ uint32_t activated(uint32_t gates, uint32_t ups, float weight) const {
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const gate = of_pair(gates, i), up = of_pair(ups, i);
      mlp::Gated of;
      if constexpr (kForm == Form::kPlain || kForm == Form::kGated) {
        of = mlp::gated<kForm == Form::kPlain>(params_.gated, gate, up);
      } else {
        of = mlp::gated(params_.activation, gate, up);
      }
      y[i] = (Config::kHasUp ? of.activation * of.up : of.activation) * weight;
    }
    return rounded_pair(y[0], y[1]);
  }

  // Writes `left` elements, and at most kElements.
  __device__ void write(void* result, int64_t at, int left, uint4 const& elements) const {
    auto* const out = static_cast<uint16_t*>(result) + at;
    if (params_.n % kElements == 0) {
      *reinterpret_cast<uint4*>(out) = elements;
      return;
    }
    uint32_t const words[] = {elements.x, elements.y, elements.z, elements.w};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < left) out[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
    }
  }

  Params const& params_;
  WorkTile const& work_;
};

}  // namespace jgg::packed
