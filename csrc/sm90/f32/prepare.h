// The passes over float32 operands before they are multiplied: who owns each row, the largest
// magnitude of each group, and the parts.
#pragma once

#include <cuda_runtime.h>

#include "sm90/f32/workspace.h"

namespace jgg::sm90::f32 {

// Fills `workspace` from the operands: a memory set and three kernels, whatever the operands.
cudaError_t prepare(RaggedDotArguments const& arguments, Workspace const& workspace,
                    cudaStream_t stream);

}  // namespace jgg::sm90::f32
