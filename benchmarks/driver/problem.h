// A line of input, and what every kind of problem is prepared into.
#pragma once

#include <functional>
#include <iostream>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string>

#include "reference.h"

namespace driver {

// A ragged product in the terms of benchmarks/harness/cases.py: `k` is contracted unless
// `contracting`, in which rows are. For a symmetric update: `groups` matrices of [rows, rows], `k`
// terms.
struct Problem {
  std::string kind;
  std::string label;
  int groups;
  int rows;
  int k;
  int n;
  std::vector<int> sizes;

  int used_rows() const { return std::accumulate(sizes.begin(), sizes.end(), 0); }
};

// `kind label groups rows k n size...`; false at the end of the input.
inline bool read(std::istream& input, Problem& problem) {
  std::string line;
  while (std::getline(input, line)) {
    std::istringstream words(line);
    if (!(words >> problem.kind)) continue;
    if (!(words >> problem.label >> problem.groups >> problem.rows >> problem.k >> problem.n)) {
      std::fprintf(stderr, "not a problem: %s\n", line.c_str());
      std::exit(1);
    }
    problem.sizes.assign(std::istream_iterator<int>(words), std::istream_iterator<int>());
    return true;
  }
  return false;
}

// Which of the compiled kernels to run.
struct Choice {
  int config = 0;     // in the family's list: ragged products and symmetric updates
  int stream_k = 0;   // ragged products: whether the last wave is cut along K
  int few_rows = 16;  // FP8 products: rows a group up to which they are on the other side of WGMMA
};

// For schedules that need scratch memory; those that count in it expect zeros.
constexpr size_t kWorkspaceBytes = 64 << 20;

// Sets members that not every source tree has.
template <class T>
auto set_workspace(T& to, void* workspace, int) -> decltype(to.workspace = workspace, void()) {
  to.workspace = workspace;
  to.workspace_bytes = kWorkspaceBytes;
}
template <class T>
void set_workspace(T&, void*, long) {}
template <class T, class Value>
auto set_accumulate(T& to, Value value, int) -> decltype(to.accumulate = value, void()) {
  to.accumulate = value;
}
template <class T, class Value>
void set_accumulate(T&, Value, long) {
  std::fprintf(stderr, "these kernels do not add to their results\n");
  std::exit(2);
}

struct Prepared {
  std::function<cudaError_t(cudaStream_t)> launch;
  Reference reference;
  size_t out_bytes;
  void const* initial = nullptr;  // contents of the result, if the kernel reads it
  double flops;
  double bytes = 0;  // read and written, where that is what counts
  // Of the result against something other than a reference product, given a number of samples.
  std::function<float(int)> worst_error;
  float most_error = 1;
  std::vector<std::shared_ptr<void>> buffers;

  // Keeps a buffer as long as the problem.
  template <class T>
  T* keep(std::shared_ptr<void> const& buffer) {
    buffers.push_back(buffer);
    return static_cast<T*>(buffer.get());
  }
};

inline void* keep_workspace(Prepared& prepared) {
  void* const workspace = prepared.keep<void>(allocate(kWorkspaceBytes));
  require(cudaMemset(workspace, 0, kWorkspaceBytes), "cudaMemset");
  return workspace;
}

// Operands are different from each other, and the same in every process.
enum Seed : uint64_t { kLhs = 1, kRhs, kLhsScales, kRhsScales, kOut };

// First and past-the-last row of each group, in groups that start at multiples of `pad` rows.
inline void set_groups(Prepared& prepared, std::vector<int> const& sizes, int pad) {
  std::vector<int> begin, end;
  int at = 0;
  for (int const size : sizes) {
    begin.push_back(at);
    end.push_back(at + size);
    at += (size + pad - 1) / pad * pad;
  }
  prepared.reference.group_begin = prepared.keep<int>(to_device(begin));
  prepared.reference.group_end = prepared.keep<int>(to_device(end));
}

}  // namespace driver
