#include "gemm_sm80.h"

namespace jgg::peers {

std::unique_ptr<Plan> gemm_sm80_device(std::vector<Problem> const& problems) {
  return gemm_sm80<cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>(problems);
}

}  // namespace jgg::peers
