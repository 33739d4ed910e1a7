// The passes over lists of float32 operands before they are multiplied: the largest magnitude of
// each matrix, and the parts.
#pragma once

#include <cuda_runtime.h>

#include "parts/listed_workspace.h"

namespace jgg::parts {

// Fills `workspace` from the stacks that it was laid out for: a memory set and two kernels, or two
// for every so many stacks.
cudaError_t prepare(std::vector<MatrixStack> const& stacks, ListedWorkspace const& workspace,
                    cudaStream_t stream);

}  // namespace jgg::parts
