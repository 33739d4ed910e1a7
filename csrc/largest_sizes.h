// The largest sizes that kernels take. Python's plans have the same limits in
// `jax_grouped_gemm/_src/sizes.py` and say why they refuse larger sizes. Handlers check the limits
// again.
#pragma once

#include <cstdint>

namespace jgg {

// The largest size of a dimension of an operand, of the rows of all batches together, and of their
// matrices. It keeps below 2^31 what kernels compute with 32 bits:
//   - rows of both parts of a float32 operand and steps of its three products,
//   - twice the mean rows of a group, global and local groups together, gate and up together,
//   - rows from the end of a group, which descriptors count to `sm90::kRaggedRows`,
//   - tiles and blocks of an array, of which no device of compute capability 9.0 has room for 2^31.
constexpr int64_t kMostSize = int64_t{1} << 29;

// The most batches of kernels that move rows, where batches are a dimension of the grid.
constexpr int kMostRowBatches = 65535;

}  // namespace jgg
