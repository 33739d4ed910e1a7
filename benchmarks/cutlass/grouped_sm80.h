// Plans of the grouped kernels in CUTLASS's 2.x API: products (cutlass::gemm::device::GemmGrouped)
// and updates (cutlass::gemm::device::Rank2KGrouped), whose arguments are nearly the same.
#pragma once

#include "cutlass/gemm/device/base_grouped.h"
#include "plan.h"

namespace jgg::peers {

// `Grouped` is CUTLASS's device-level operator. All operands are row-major. A product has operands
// [m, k] and [k, n], and an update has two operands [n, k].
template <class Grouped, bool kIsUpdate>
class GroupedPlan : public Plan {
  using Coord = cutlass::gemm::GemmCoord;
  using ElementA = typename Grouped::ElementA;
  using ElementB = typename Grouped::ElementB;
  using ElementC = typename Grouped::ElementC;
  using Scale = typename Grouped::EpilogueOutputOp::ElementCompute;

 public:
  explicit GroupedPlan(std::vector<Problem> const& problems) {
    for (Problem const& p : problems) sizes_.push_back({p.m, p.n, p.k});
    device_sizes_ = DeviceArray<Coord>(sizes_);
    a_ = gather(problems, [](Problem const& p) { return static_cast<ElementA*>(p.a); });
    b_ = gather(problems, [](Problem const& p) { return static_cast<ElementB*>(p.b); });
    out_ = gather(problems, [](Problem const& p) { return static_cast<ElementC*>(p.out); });
    lda_ = gather(problems, [](Problem const& p) { return int64_t(p.k); });
    ldb_ = gather(problems, [](Problem const& p) { return int64_t(kIsUpdate ? p.k : p.n); });
    ldc_ = gather(problems, [](Problem const& p) { return int64_t(p.n); });

    auto const arguments = [&](auto... mode) {
      int const count = static_cast<int>(sizes_.size());
      int const blocks = Grouped::sufficient(sizes_.data(), count);
      if (blocks < 1) throw std::runtime_error("the kernel does not fit this device");
      return typename Grouped::Arguments(
          mode..., device_sizes_.get(), count, blocks, {Scale(1), Scale(0)}, a_.get(), b_.get(),
          out_.get(), out_.get(), lda_.get(), ldb_.get(), ldc_.get(), ldc_.get(), sizes_.data());
    };
    if constexpr (kIsUpdate) {
      initialize(arguments(cutlass::gemm::GemmUniversalMode::kGemm));
    } else {
      initialize(arguments());
    }
  }

  cutlass::Status run(cudaStream_t stream) override { return grouped_.run(stream); }

 private:
  // If the kernel has the mode kHostPrecompute, CUTLASS makes the schedule here and copies it to
  // the device.
  void initialize(typename Grouped::Arguments const& arguments) {
    workspace_ = DeviceArray<uint8_t>(Grouped::get_workspace_size(arguments));
    check(grouped_.initialize(arguments, workspace_.get()), "initialize");
    check(cudaDeviceSynchronize(), "initialize");
  }

  std::vector<Coord> sizes_;
  DeviceArray<Coord> device_sizes_;
  DeviceArray<ElementA*> a_;
  DeviceArray<ElementB*> b_;
  DeviceArray<ElementC*> out_;
  DeviceArray<int64_t> lda_, ldb_, ldc_;
  DeviceArray<uint8_t> workspace_;
  Grouped grouped_;
};

}  // namespace jgg::peers
