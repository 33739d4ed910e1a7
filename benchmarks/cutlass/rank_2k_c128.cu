#include "rank_2k.h"

namespace jgg::peers {

using cutlass::gemm::GemmShape;

// Two of the tiles that CUTLASS's library of kernels has for Hopper.
std::unique_ptr<Plan> her2k_c128_64x64(std::vector<Problem> const& problems) {
  return rank_2k<cutlass::complex<double>, cutlass::arch::Sm90, GemmShape<64, 64, 8>,
                 GemmShape<32, 32, 8>, GemmShape<16, 8, 4>, 3>(problems);
}

std::unique_ptr<Plan> her2k_c128_128x64(std::vector<Problem> const& problems) {
  return rank_2k<cutlass::complex<double>, cutlass::arch::Sm90, GemmShape<128, 64, 8>,
                 GemmShape<32, 32, 8>, GemmShape<16, 8, 4>, 3>(problems);
}

}  // namespace jgg::peers
