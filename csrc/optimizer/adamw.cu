// AdamW in float32, which also writes the FP8 weights. The bytes of the FP8 weights are all that it
// moves in addition to plain AdamW.
#include "optimizer/block_update.h"

namespace jgg::optimizer {
namespace {

struct Adamw {
  using Scalars = AdamwScalars;
  // Unaligned elements are moved one by one, which takes more registers.
  static constexpr int blocks_of_multiprocessor(bool aligned) { return aligned ? 2 : 1; }
  template <bool kAligned>
  static constexpr int kRowsAtOnce = kAligned ? 2 : 1;

  Scalars const* scalars;
  Elements gradient;
  Elements mean;
  Elements square;

  struct Operands {
    Loaded gradient;
    Loaded mean;
    Loaded square;
  };

  __device__ __forceinline__ static bool applies(Scalars const& s) { return s.applies != 0; }

  template <bool kAligned>
  __device__ __forceinline__ Operands load(int64_t at, int count) const {
    return {optimizer::load<kAligned>(gradient, at, count),
            optimizer::load<kAligned>(mean, at, count),
            optimizer::load<kAligned>(square, at, count)};
  }

  template <bool kAligned>
  __device__ __forceinline__ Quartet update(Scalars const& s, Operands const& old,
                                            Quartet const& weights, int64_t at, int count) const {
    Quartet const gradients = old.gradient.as_floats(gradient.type);
    Quartet means = old.mean.as_floats(mean.type), squares = old.square.as_floats(square.type);
    Quartet updated;
#pragma unroll
    for (int i = 0; i < kQuartet; ++i) {
      float const g = gradients.x[i] * s.gradient_factor;
      float const m = s.mean_share * g + s.mean_decay * means.x[i];
      float const v = s.square_share * (g * g) + s.square_decay * squares.x[i];
      float const size = __fsqrt_rn(v * s.square_factor + s.inner_epsilon) + s.epsilon;
      float const change = __fdiv_rn(s.mean_rate * m + s.gradient_rate * g, size);
      means.x[i] = m;
      squares.x[i] = v;
      // Elements past the matrix get 0, because their change is 0 / 0 where `epsilon` is 0.
      updated.x[i] = i < count ? weights.x[i] - (change + s.decay * weights.x[i]) : 0;
    }
    store<kAligned>(mean, at, means, count);
    store<kAligned>(square, at, squares, count);
    return updated;
  }
};

}  // namespace

cudaError_t adamw_quantized(AdamwArguments const& arguments, cudaStream_t stream) {
  return launch(Adamw{arguments.scalars, arguments.gradient, arguments.mean, arguments.square},
                arguments.weights, stream);
}

}  // namespace jgg::optimizer
