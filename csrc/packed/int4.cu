#include "packed/decoding_launch.h"
#include "packed/streaming_launch.h"

namespace jgg::packed {

template cudaError_t streamed<Format::kInt4>(Arguments const&, cudaStream_t);
template cudaError_t decoded<Format::kInt4>(Arguments const&, cudaStream_t);
template cudaError_t streamed<Format::kInt4Zeros>(Arguments const&, cudaStream_t);
template cudaError_t decoded<Format::kInt4Zeros>(Arguments const&, cudaStream_t);

}  // namespace jgg::packed
