// The interface of products of lists of matrices: arguments in, a launch on a stream out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "scheduler/problem_list.h"
#include "types.h"

namespace jgg {

// The most problems of a launch. A kernel's parameters have room for no more.
constexpr int kMaxListedProblems = 79;
// Launches of up to this many problems have smaller parameters. Compared with a launch of 4
// problems, a launch of 60 was measured to take 2 us longer, and a launch of 24 less than 1 us
// longer.
constexpr int kFewListedProblems = 24;

// Products of `matrices` pairs of [m, k] and [k, n]. The matrices of each operand are contiguous.
struct GroupedGemmProblem {
  void const* lhs;
  void const* rhs;
  void* out;
  int matrices;
  int m;
  int n;
  int k;
};

// alpha A B + beta C for each pair of matrices. If `adds_c`, C is what `out` holds at the start.
// Otherwise there is no C.
struct GroupedGemmArguments {
  std::vector<GroupedGemmProblem> problems;
  ElementType type;      // of lhs and rhs
  ElementType out_type;  // `type` or kF32
  bool transpose_lhs;    // stored [k, m]
  bool transpose_rhs;    // stored [n, k]
  bool adds_c;
  // One scale for each matrix. If null, all matrices have `alpha` or `beta`.
  float const* alphas;
  float const* betas;
  float alpha;
  float beta;
  // The work of `clusters` clusters, [rounds, clusters]. Null if clusters find their work
  // themselves.
  ScheduledUnit const* schedule;
  int rounds;
  int clusters;
  Accuracy accuracy = Accuracy::kTf32;  // of products of float32
  // Receives the parts of float32 operands.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // The bits of each matrix's largest magnitude, for operands in float16 parts.
  unsigned const* lhs_maxima = nullptr;
  unsigned const* rhs_maxima = nullptr;
};

// Returns how many bytes of workspace float32 operands need.
int64_t grouped_gemm_workspace_bytes(GroupedGemmArguments const& arguments);
// Splits float32 operands into the workspace. `parts` becomes the same products with pointers to
// the parts.
cudaError_t split_operands(GroupedGemmArguments const& arguments, GroupedGemmArguments& parts,
                           cudaStream_t stream);

// Returns kNotCompiled if there is no such kernel.
cudaError_t grouped_gemm(TileConfig config, GroupedGemmArguments const& arguments,
                         cudaStream_t stream);

}  // namespace jgg
