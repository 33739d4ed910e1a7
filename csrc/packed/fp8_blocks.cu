#include "packed/decoding_launch.h"
#include "packed/streaming_launch.h"

namespace jgg::packed {

template cudaError_t streamed<Format::kFp8Blocks>(Arguments const&, cudaStream_t);
template cudaError_t decoded<Format::kFp8Blocks>(Arguments const&, cudaStream_t);

}  // namespace jgg::packed
