// The launch of a contracting product of float32 operands.
#pragma once

#include "ragged/contracting.h"
#include "ragged/parts_launch.h"

namespace jgg::sm90 {

// Rows are contracted, so lhs [m, k] and rhs [m, n] are both contiguous along what is kept.
template <ElementType>
cudaError_t contracting_parts(TileConfig config, RaggedDotArguments const& arguments,
                              cudaStream_t stream) {
  if (arguments.accumulate) return kNotCompiled;
  return launch_parts<RaggedContracting, Major::kMN, OneOf<false>>(config, arguments, stream);
}

}  // namespace jgg::sm90
