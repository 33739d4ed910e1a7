// Lists of unequal products in double precision: arguments in, launches on a stream out.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "types.h"

namespace jgg::fp64 {

// out = alpha lhs rhs + beta C with a result [m, n]. If the arguments add C, it is what `out` holds
// at the start. No dimension is zero.
struct GemmProblem {
  void const* lhs;
  void const* rhs;
  void* out;
  void const* alpha;
  void const* beta;
  int m;
  int n;
  int k;
};

// lhs [m, k] or, if transposed, [k, m]; rhs [k, n] or, if transposed, [n, k].
struct GemmArguments {
  std::vector<GemmProblem> problems;
  ElementType type;
  bool adds_c;
  bool lhs_transposed;
  bool rhs_transposed;
};

// Returns kNotCompiled if there is no such kernel.
cudaError_t gemm_fp64(TileConfig config, GemmArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::fp64
