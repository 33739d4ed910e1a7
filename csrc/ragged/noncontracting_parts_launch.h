// The launch of a noncontracting product of float32 operands.
#pragma once

#include "ragged/noncontracting.h"
#include "ragged/parts_launch.h"

namespace jgg::sm90 {

// lhs [m, k] is contiguous along K, rhs [g, k, n] along N.
template <ElementType>
cudaError_t noncontracting_parts(TileConfig config, RaggedDotArguments const& arguments,
                                 cudaStream_t stream) {
  return launch_parts<RaggedNoncontracting, Major::kK, Flag>(config, arguments, stream);
}

}  // namespace jgg::sm90
