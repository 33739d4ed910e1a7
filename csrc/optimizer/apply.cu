// Adds the updates of any optimiser to float32 weights, and writes those in FP8 on the way.
#include "optimizer/block_update.h"

namespace jgg::optimizer {
namespace {

template <class Update>
struct Apply {
  using Scalars = float;  // whether the step applies
  static constexpr int kBlocksOfMultiprocessor = 2;
  template <bool kAligned>
  static constexpr int kRowsAtOnce = kAligned ? 4 : 1;

  Scalars const* scalars;
  Update const* change;

  struct Operands {
    Quartet<Update> change;
    Quartet<float> master;
  };

  __device__ __forceinline__ static bool applies(Scalars const& applies) { return applies != 0; }

  template <bool kAligned>
  __device__ __forceinline__ Operands load(float const* master, int64_t at, int count) const {
    return {Quartet<Update>::template load<kAligned>(change + at, count),
            Quartet<float>::load<kAligned>(master + at, count)};
  }

  template <bool kAligned>
  __device__ __forceinline__ Quartet<float> update(Scalars const&, Operands const& old, int64_t,
                                                   int) const {
    return Quartet<float>::of([&](int i) { return old.master[i] + old.change[i]; });
  }
};

}  // namespace

cudaError_t apply_and_quantize(ApplyArguments const& arguments, cudaStream_t stream) {
  return with_constants(
      [&](auto update) {
        using Update = StoredAs<update>;
        return launch(
            Apply<Update>{arguments.applies, static_cast<Update const*>(arguments.update)},
            arguments.weights, stream);
      },
      OneOf<ElementType::kBf16, ElementType::kF32>{arguments.update_type});
}

}  // namespace jgg::optimizer
