#include "gemm_sm90.h"

namespace jgg::peers {

// A is stored as [m, k], and B as [k, n].
using LayoutA = cutlass::layout::RowMajor;
using LayoutB = cutlass::layout::RowMajor;

std::unique_ptr<Plan> gemm_sm90_cooperative_nn(std::vector<Problem> const& problems) {
  return gemm_sm90<Cooperative, 128, 256, 2, LayoutA, LayoutB>(problems);
}

std::unique_ptr<Plan> gemm_sm90_pingpong_nn(std::vector<Problem> const& problems) {
  return gemm_sm90<PingPong, 128, 128, 2, LayoutA, LayoutB>(problems);
}

}  // namespace jgg::peers
