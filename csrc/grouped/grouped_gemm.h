// The interface of products of lists of matrices: arguments in, a launch on a stream out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "scheduler/problem_list.h"
#include "types.h"

namespace jgg {

// Problems to a launch: what fits into the parameters of a kernel.
constexpr int kMaxListedProblems = 79;
// Launches of no more take smaller parameters. A launch with descriptors of 60 problems was
// measured to take 2 us longer than one of 4, one of 24 less than 1 us.
constexpr int kFewListedProblems = 24;

// Products of `matrices` pairs of [m, k] and [k, n], each kind one after another in memory.
struct GroupedGemmProblem {
  void const* lhs;
  void const* rhs;
  void* out;
  int matrices;
  int m;
  int n;
  int k;
};

// alpha A B + beta C for each pair of matrices. C is what `out` holds at the start, if `adds_c`.
struct GroupedGemmArguments {
  std::vector<GroupedGemmProblem> problems;
  ElementType type;      // of lhs and rhs
  ElementType out_type;  // `type` or kF32
  bool transpose_lhs;    // stored [k, m]
  bool transpose_rhs;    // stored [n, k]
  bool adds_c;
  // One scale for each matrix; if null, all matrices have the value.
  float const* alphas;
  float const* betas;
  float alpha;
  float beta;
  // The work of `clusters` clusters, [rounds, clusters]. Null if they find it themselves.
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

// Bytes of workspace that float32 operands need.
int64_t grouped_gemm_workspace_bytes(GroupedGemmArguments const& arguments);
// Splits these into the workspace. `parts` becomes the same products with pointers to the parts.
cudaError_t split_operands(GroupedGemmArguments const& arguments, GroupedGemmArguments& parts,
                           cudaStream_t stream);

// kNotCompiled if there is no such kernel.
cudaError_t grouped_gemm(TileConfig config, GroupedGemmArguments const& arguments,
                         cudaStream_t stream);

}  // namespace jgg
