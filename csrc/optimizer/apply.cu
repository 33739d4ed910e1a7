// Adds the updates of any optimiser to float32 weights, and also writes the weights in FP8.
#include "optimizer/block_update.h"

namespace jgg::optimizer {
namespace {

struct Apply {
  using Scalars = float;  // 0 if the step is skipped
  static constexpr int blocks_of_multiprocessor(bool) { return 2; }
  template <bool kAligned>
  static constexpr int kRowsAtOnce = kAligned ? 2 : 1;

  Scalars const* scalars;
  Elements change;

  using Operands = Loaded;

  __device__ __forceinline__ static bool applies(Scalars const& applies) { return applies != 0; }

  template <bool kAligned>
  __device__ __forceinline__ Operands load(int64_t at, int count) const {
    return optimizer::load<kAligned>(change, at, count);
  }

  template <bool kAligned>
  __device__ __forceinline__ Quartet update(Scalars const&, Operands const& old,
                                            Quartet const& weights, int64_t, int) const {
    Quartet updated = old.as_floats(change.type);
#pragma unroll
    for (int i = 0; i < kQuartet; ++i) updated.x[i] += weights.x[i];
    return updated;
  }
};

}  // namespace

cudaError_t apply_and_quantize(ApplyArguments const& arguments, cudaStream_t stream) {
  return launch(Apply{arguments.applies, arguments.update}, arguments.weights, stream);
}

}  // namespace jgg::optimizer
