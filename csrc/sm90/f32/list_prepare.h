// The passes over lists of float32 operands before they are multiplied: the largest magnitude of
// each matrix, and the parts.
#pragma once

#include <cuda_runtime.h>

#include "sm90/f32/list_workspace.h"

namespace jgg::sm90::f32 {

// Fills `workspace` from the stacks that it was laid out for: a memory set and two kernels, or two
// for every so many stacks.
cudaError_t prepare(std::vector<MatrixStack> const& stacks, ListWorkspace const& workspace,
                    cudaStream_t stream);

}  // namespace jgg::sm90::f32
