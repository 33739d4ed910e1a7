#include "gemm_sm90.h"

namespace jgg::peers {

// Stored [k, m] and [k, n].
using LayoutA = cutlass::layout::ColumnMajor;
using LayoutB = cutlass::layout::RowMajor;

std::unique_ptr<Plan> gemm_sm90_cooperative_tn(std::vector<Problem> const& problems) {
  return gemm_sm90<Cooperative, 128, 256, 2, LayoutA, LayoutB>(problems);
}

std::unique_ptr<Plan> gemm_sm90_pingpong_tn(std::vector<Problem> const& problems) {
  return gemm_sm90<PingPong, 128, 128, 2, LayoutA, LayoutB>(problems);
}

}  // namespace jgg::peers
