// Rank-k and rank-2k updates in double precision: arguments in, launches on a stream out.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "scheduler/triangular.h"
#include "types.h"

namespace jgg::fp64 {

// Like jgg::RankKStack, but everything has one element type.
struct RankKStack {
  void const* a;
  void const* b;  // null in a rank-k update
  void* out;
  void const* alpha;
  void const* beta;
  int matrices;
  int n;
  int k;
  int alpha_stride;
  int beta_stride;
};

// Like jgg::RankKArguments. If `hermitian`, results are alpha A A^H + beta C with real alpha and
// beta, or alpha A B^H + conj(alpha) B A^H + beta C with real beta.
struct RankKArguments {
  std::vector<RankKStack> stacks;
  ElementType type;
  Uplo uplo;
  OtherTriangle other;
  bool adds_c;
  bool transpose;
  bool hermitian;
};

// Returns kNotCompiled if there is no such kernel.
cudaError_t rank_k_fp64(TileConfig config, RankKArguments const& arguments, cudaStream_t stream);

}  // namespace jgg::fp64
