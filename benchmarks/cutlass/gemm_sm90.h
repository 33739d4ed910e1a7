// Grouped products in CUTLASS's 3.x API, as CUTLASS's example 57 assembles them. The kernel is
// persistent, and finds its tiles and rewrites its TMA descriptors on the device.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "plan.h"

namespace jgg::peers {

struct Cooperative {
  using Kernel = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

struct PingPong {
  using Kernel = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// LayoutA is the layout of A [m, k], and LayoutB that of B [k, n]. The result is row-major.
template <class Schedule, class Tile, class Cluster, class LayoutA, class LayoutB>
class GemmSm90Plan : public Plan {
  using Element = cutlass::bfloat16_t;
  using LayoutC = cutlass::layout::RowMajor;
  static constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;
  using Shape = cute::Shape<int, int, int>;
  using ProblemShape = cutlass::gemm::GroupProblemShape<Shape>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, LayoutC*, kAlignment,
      Element, LayoutC*, kAlignment, typename Schedule::Epilogue,
      cutlass::epilogue::fusion::LinearCombination<Element, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element,
      LayoutB*, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>,
      typename Schedule::Kernel>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideC = typename Kernel::InternalStrideD;

 public:
  explicit GemmSm90Plan(std::vector<Problem> const& problems) {
    for (Problem const& p : problems) shapes_.push_back({p.m, p.n, p.k});
    device_shapes_ = DeviceArray<Shape>(shapes_);
    a_ = gather(problems, [](Problem const& p) { return static_cast<Element const*>(p.a); });
    b_ = gather(problems, [](Problem const& p) { return static_cast<Element const*>(p.b); });
    out_ = gather(problems, [](Problem const& p) { return static_cast<Element*>(p.out); });
    stride_a_ = gather(problems, [](Problem const& p) { return stride<StrideA>(p.m, p.k); });
    stride_b_ = gather(problems, [](Problem const& p) { return stride<StrideB>(p.n, p.k); });
    stride_c_ = gather(problems, [](Problem const& p) { return stride<StrideC>(p.m, p.n); });

    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {static_cast<int>(shapes_.size()), device_shapes_.get(), shapes_.data()},
        {a_.get(), stride_a_.get(), b_.get(), stride_b_.get()},
        {{}, nullptr, stride_c_.get(), out_.get(), stride_c_.get()},
        cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>()};
    arguments.epilogue.thread.alpha = 1.0f;
    arguments.epilogue.thread.beta = 0.0f;
    check(Gemm::can_implement(arguments), "can_implement");
    workspace_ = DeviceArray<uint8_t>(Gemm::get_workspace_size(arguments));
    check(gemm_.initialize(arguments, workspace_.get()), "initialize");
    check(cudaDeviceSynchronize(), "initialize");
  }

  cutlass::Status run(cudaStream_t stream) override { return gemm_.run(stream); }

 private:
  // Returns the stride of a row-major or column-major matrix without gaps. CUTLASS calls the
  // contracted dimension of A and of B its columns.
  template <class Stride>
  static Stride stride(int rows, int columns) {
    Stride found{};
    if constexpr (cute::is_static_v<decltype(cute::get<0>(found))>) {
      cute::get<1>(found) = rows;
    } else {
      cute::get<0>(found) = columns;
    }
    return found;
  }

  std::vector<Shape> shapes_;
  DeviceArray<Shape> device_shapes_;
  DeviceArray<Element const*> a_, b_;
  DeviceArray<Element*> out_;
  DeviceArray<StrideA> stride_a_;
  DeviceArray<StrideB> stride_b_;
  DeviceArray<StrideC> stride_c_;
  DeviceArray<uint8_t> workspace_;
  Gemm gemm_;
};

template <class Schedule, int kTileM, int kTileN, int kCluster, class LayoutA, class LayoutB>
std::unique_ptr<Plan> gemm_sm90(std::vector<Problem> const& problems) {
  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::_64>;
  using Cluster = cute::Shape<cute::Int<kCluster>, cute::_1, cute::_1>;
  return std::make_unique<GemmSm90Plan<Schedule, Tile, Cluster, LayoutA, LayoutB>>(problems);
}

}  // namespace jgg::peers
