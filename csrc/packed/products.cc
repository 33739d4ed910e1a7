// Selects the kernels of a format.
#include "dispatch.h"
#include "packed/packed.h"

namespace jgg::packed {

// Each format has a translation unit of its own.
template <Format kFormat>
cudaError_t streamed(Arguments const& arguments, cudaStream_t stream);
template <Format kFormat>
cudaError_t decoded(Arguments const& arguments, cudaStream_t stream);

namespace {

using Formats = OneOf<Format::kMxFp4, Format::kInt4, Format::kInt4Zeros, Format::kInt8,
                      Format::kFp8, Format::kFp8Blocks>;

}  // namespace

cudaError_t streamed_dot(Arguments const& a, cudaStream_t stream) {
  return with_constants([&](auto format) { return streamed<format.value>(a, stream); },
                        Formats{compiled_format(a.format, a.gate)});
}

cudaError_t decoded_dot(Arguments const& a, cudaStream_t stream) {
  return with_constants([&](auto format) { return decoded<format.value>(a, stream); },
                        Formats{compiled_format(a.format, a.gate)});
}

}  // namespace jgg::packed
