// The interface of plans. A plan is a list of problems bound to a kernel, ready to be launched.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cutlass/cutlass.h"

namespace jgg::peers {

// A product out [m, n] = A [m, k] B [k, n], or an update of the lower triangle of out [n, n] from
// A and B [n, k], in device memory without gaps.
struct Problem {
  int m;
  int n;
  int k;
  void* a;
  void* b;
  void* out;
};

// A plan owns everything that the kernel reads, except the operands. Making a plan does everything
// that CUTLASS does once for a list, so that run() only launches the kernel.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual cutlass::Status run(cudaStream_t stream) = 0;
};

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

inline void check(cutlass::Status status, char const* what) {
  if (status != cutlass::Status::kSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cutlassGetStatusString(status));
  }
}

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) {
    if (count) check(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(std::vector<T> const& values) : DeviceArray(values.size()) {
    if (values.empty()) return;
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
  DeviceArray(DeviceArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

// Returns an array on the device with `of(problem)` for each problem.
template <class Function>
auto gather(std::vector<Problem> const& problems, Function of) {
  std::vector<decltype(of(problems[0]))> values;
  for (Problem const& problem : problems) values.push_back(of(problem));
  return DeviceArray<decltype(of(problems[0]))>(values);
}

// Sorts problems by descending k, like sort_problems() of CUTLASS's device-level grouped kernels.
inline std::vector<Problem> sorted(std::vector<Problem> problems) {
  std::stable_sort(problems.begin(), problems.end(),
                   [](Problem const& x, Problem const& y) { return x.k > y.k; });
  return problems;
}

}  // namespace jgg::peers
