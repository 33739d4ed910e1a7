// The largest sizes that kernels take. Python's plans have the same limits in
// `jax_grouped_gemm/_src/sizes.py` and say why they refuse larger sizes. Handlers check the limits
// again.
#pragma once

#include <cstdint>

namespace jgg {

// The most elements of a dimension of an operand, the most rows of all batches together, and the
// most matrices of all batches together. This limit keeps these numbers below 2^31, because kernels
// compute them with 32 bits:
//   - rows of both parts of a float32 operand and steps of its three products,
//   - twice the mean rows of a group,
//   - the sum of global and local groups,
//   - the columns of gate and up together,
//   - rows of a group in coordinates of descriptors, in which the group ends at
//     `sm90::kRaggedRows`,
//   - tiles and blocks of an array: no device of compute capability 9.0 has memory for 2^31.
constexpr int64_t kMostSize = int64_t{1} << 29;

// The most batches of kernels that move rows. Batches are the z dimension of their grids.
constexpr int kMostRowBatches = 65535;

}  // namespace jgg
