// A problem, which is a line of input, and what the driver prepares for it.
#pragma once

#include <functional>
#include <iostream>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string>

#include "reference.h"

namespace driver {

// A ragged product has the sizes of a shape in benchmarks/harness/cases.py. It contracts k, or
// rows if its kind has "tn" in its name. A symmetric update has `groups` results [rows, rows], and
// contracts k.
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

// Reads a line `kind label groups rows k n size...`, with the size of each group. Returns false at
// the end of the input.
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

// Chooses among the compiled kernels.
struct Choice {
  int config = 0;     // ragged products, symmetric updates: the number of the tile in its table
  int stream_k = 0;   // ragged products: whether the last wave is cut along K
  int few_rows = 16;  // FP8 products: up to this many rows a group, the kernel is a swapped one
};

// The bytes of the workspace. It is set to zero, because schedules with counters in it expect this.
constexpr size_t kWorkspaceBytes = 64 << 20;

// These functions set members that not every source tree has. The overloads with `long` are for
// trees without the member.
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
  double bytes = 0;  // read and written, if the speed is in TB/s; otherwise 0
  // Returns the largest error of a number of samples. If empty, `reference` gives the error.
  std::function<float(int)> worst_error;
  float most_error = 1;
  std::vector<std::shared_ptr<void>> buffers;

  // Keeps a buffer as long as this object exists, and returns its address.
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

// Each operand has its own seed, so operands differ. They are the same in every process.
enum Seed : uint64_t { kLhs = 1, kRhs, kLhsScales, kRhsScales, kOut };

// Sets where each group begins and ends. Groups start at multiples of `pad` rows.
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
