// Turns updates of float32 operands into updates of their float16 parts.
#pragma once

#include <cuda_runtime.h>

#include "rank_k/rank_k.h"

namespace jgg {

// Splits the operands of `arguments` into its workspace. `parts` becomes the same updates with
// pointers to the parts.
cudaError_t split_operands(RankKArguments const& arguments, RankKArguments& parts,
                           cudaStream_t stream);

}  // namespace jgg
