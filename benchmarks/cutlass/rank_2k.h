// Grouped rank-2k updates in double precision. Updates of complex elements are Hermitian. They
// differ from updates of real elements only in the type of the kernel.
#pragma once

// clang-format off: CUTLASS's headers do not include all that they need.
#include "cutlass/blas3.h"
#include "cutlass/complex.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/rank_2k_grouped.h"
#include "cutlass/gemm/kernel/default_rank_2k_grouped.h"
#include "cutlass/gemm/device/rank_2k_grouped.h"
// clang-format on
#include "grouped_sm80.h"

namespace jgg::peers {

template <class Element, class Arch, class Tile, class WarpTile, class Instruction, int kStages>
std::unique_ptr<Plan> rank_2k(std::vector<Problem> const& problems) {
  using Layout = cutlass::layout::RowMajor;
  constexpr bool kIsComplex = cutlass::is_complex<Element>::value;
  // For CUTLASS, a Hermitian update of row-major operands is an update of conjugated operands.
  constexpr auto kTransform =
      kIsComplex ? cutlass::ComplexTransform::kConjugate : cutlass::ComplexTransform::kNone;
  using Operator = std::conditional_t<kIsComplex, cutlass::arch::OpMultiplyAddComplex,
                                      cutlass::arch::OpMultiplyAdd>;
  using Kernel = typename cutlass::gemm::kernel::DefaultRank2KGrouped<
      Element, Layout, kTransform, 1, Element, Layout, kTransform, 1, Element, Layout,
      cutlass::FillMode::kLower, Element, cutlass::arch::OpClassTensorOp, Arch, Tile, WarpTile,
      Instruction, cutlass::epilogue::thread::LinearCombination<Element, 1, Element, Element>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, kStages, Operator,
      kIsComplex ? cutlass::BlasMode::kHermitian : cutlass::BlasMode::kSymmetric,
      cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::Rank2Kkernel;
  return std::make_unique<GroupedPlan<cutlass::gemm::device::Rank2KGrouped<Kernel>, true>>(
      problems);
}

}  // namespace jgg::peers
