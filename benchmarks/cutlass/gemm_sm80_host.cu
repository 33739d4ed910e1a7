#include "gemm_sm80.h"

namespace jgg::peers {

std::unique_ptr<Plan> gemm_sm80_host(std::vector<Problem> const& problems) {
  return gemm_sm80<cutlass::gemm::kernel::GroupScheduleMode::kHostPrecompute>(problems);
}

}  // namespace jgg::peers
