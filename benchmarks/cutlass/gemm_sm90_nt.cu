#include "gemm_sm90.h"

namespace jgg::peers {

// Stored [m, k] and [n, k].
using LayoutA = cutlass::layout::RowMajor;
using LayoutB = cutlass::layout::ColumnMajor;

std::unique_ptr<Plan> gemm_sm90_cooperative_nt(std::vector<Problem> const& problems) {
  return gemm_sm90<Cooperative, 128, 256, 2, LayoutA, LayoutB>(problems);
}

std::unique_ptr<Plan> gemm_sm90_pingpong_nt(std::vector<Problem> const& problems) {
  return gemm_sm90<PingPong, 128, 128, 2, LayoutA, LayoutB>(problems);
}

}  // namespace jgg::peers
