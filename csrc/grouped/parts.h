// Turns products of float32 operands into products of their float16 parts.
#pragma once

#include <cuda_runtime.h>

#include "grouped/grouped_gemm.h"

namespace jgg {

// Splits the operands of `arguments` into its workspace. `parts` becomes the same products with
// pointers to the parts.
cudaError_t split_operands(GroupedGemmArguments const& arguments, GroupedGemmArguments& parts,
                           cudaStream_t stream);

}  // namespace jgg
