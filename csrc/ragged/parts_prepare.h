// The passes over float32 operands before they are multiplied: who owns each row, the largest
// magnitude of each group, and the parts.
#pragma once

#include <cuda_runtime.h>

#include "ragged/parts_workspace.h"

namespace jgg::sm90 {

// Fills `workspace` from the operands: a memory set and three kernels, whatever the operands.
cudaError_t prepare(RaggedDotArguments const& arguments, RaggedWorkspace const& workspace,
                    cudaStream_t stream);

}  // namespace jgg::sm90
