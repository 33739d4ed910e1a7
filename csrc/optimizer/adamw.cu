// AdamW in float32, which writes the FP8 weights on the way: no more bytes than without them but
// theirs.
#include "optimizer/block_update.h"

namespace jgg::optimizer {
namespace {

template <class Gradient, class Mean, class Square>
struct Adamw {
  using Scalars = AdamwScalars;
  static constexpr int kBlocksOfMultiprocessor = 2;
  template <bool kAligned>
  static constexpr int kRowsAtOnce = kAligned && sizeof(Mean) == 4 ? 2 : 1;

  Scalars const* scalars;
  Gradient const* gradient;
  Mean* mean;
  Square* square;

  struct Operands {
    Quartet<Gradient> gradient;
    Quartet<Mean> mean;
    Quartet<Square> square;
    Quartet<float> master;
  };

  __device__ __forceinline__ static bool applies(Scalars const& s) { return s.applies != 0; }

  template <bool kAligned>
  __device__ __forceinline__ Operands load(float const* master, int64_t at, int count) const {
    return {Quartet<Gradient>::template load<kAligned>(gradient + at, count),
            Quartet<Mean>::template load<kAligned>(mean + at, count),
            Quartet<Square>::template load<kAligned>(square + at, count),
            Quartet<float>::load<kAligned>(master + at, count)};
  }

  template <bool kAligned>
  __device__ __forceinline__ Quartet<float> update(Scalars const& s, Operands const& old,
                                                   int64_t at, int count) const {
    Quartet<float> new_mean, new_square, master;
#pragma unroll
    for (int i = 0; i < kQuartet; ++i) {
      float const g = old.gradient[i] * s.gradient_factor;
      float const m = s.mean_share * g + s.mean_decay * old.mean[i];
      float const v = s.square_share * (g * g) + s.square_decay * old.square[i];
      float const size = __fsqrt_rn(v * s.square_factor + s.inner_epsilon) + s.epsilon;
      float const change = __fdiv_rn(s.mean_rate * m + s.gradient_rate * g, size);
      new_mean.x[i] = m;
      new_square.x[i] = v;
      // Of what does not exist, a change is 0 / 0 where `epsilon` is 0.
      master.x[i] = i < count ? old.master[i] - (change + s.decay * old.master[i]) : 0;
    }
    store_as<kAligned>(mean + at, new_mean, count);
    store_as<kAligned>(square + at, new_square, count);
    return master;
  }
};

using Floats = OneOf<ElementType::kBf16, ElementType::kF32>;

}  // namespace

cudaError_t adamw_quantized(AdamwArguments const& arguments, cudaStream_t stream) {
  return with_constants(
      [&](auto gradient, auto mean, auto square) {
        using Rule = Adamw<StoredAs<gradient>, StoredAs<mean>, StoredAs<square>>;
        return launch(
            Rule{arguments.scalars, static_cast<StoredAs<gradient> const*>(arguments.gradient),
                 static_cast<StoredAs<mean>*>(arguments.mean),
                 static_cast<StoredAs<square>*>(arguments.square)},
            arguments.weights, stream);
      },
      Floats{arguments.gradient_type}, Floats{arguments.mean_type}, Floats{arguments.square_type});
}

}  // namespace jgg::optimizer
