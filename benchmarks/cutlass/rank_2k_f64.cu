#include "rank_2k.h"

namespace jgg::peers {

using cutlass::gemm::GemmShape;

// Example 38 has this configuration.
std::unique_ptr<Plan> syr2k_f64_32x32(std::vector<Problem> const& problems) {
  return rank_2k<double, cutlass::arch::Sm80, GemmShape<32, 32, 16>, GemmShape<16, 16, 16>,
                 GemmShape<8, 8, 4>, 4>(problems);
}

// The largest tile for Hopper in CUTLASS's library of kernels.
std::unique_ptr<Plan> syr2k_f64_128x128(std::vector<Problem> const& problems) {
  return rank_2k<double, cutlass::arch::Sm90, GemmShape<128, 128, 16>, GemmShape<32, 64, 16>,
                 GemmShape<16, 8, 4>, 3>(problems);
}

}  // namespace jgg::peers
