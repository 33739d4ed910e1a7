// Grouped products as CUTLASS's example 24 configures them.
#pragma once

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm_grouped.h"
#include "cutlass/gemm/kernel/default_gemm_grouped.h"
#include "grouped_sm80.h"

namespace jgg::peers {

template <cutlass::gemm::kernel::GroupScheduleMode kMode>
std::unique_ptr<Plan> gemm_sm80(std::vector<Problem> const& problems) {
  using Element = cutlass::bfloat16_t;
  using Layout = cutlass::layout::RowMajor;
  using cutlass::gemm::GemmShape;
  constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;
  constexpr int kStages = 4;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      Element, Layout, cutlass::ComplexTransform::kNone, kAlignment, Element, Layout,
      cutlass::ComplexTransform::kNone, kAlignment, Element, Layout, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, GemmShape<128, 128, 32>,
      GemmShape<64, 64, 32>, GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<Element, kAlignment, float, float>,
      cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, kStages,
      kMode>::GemmKernel;
  return std::make_unique<GroupedPlan<cutlass::gemm::device::GemmGrouped<Kernel>, false>>(problems);
}

}  // namespace jgg::peers
